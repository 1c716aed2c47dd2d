"""Sizes a fleet before it exists: step times, memory, capacity and SLO rate of a replica.

Called by ``sluice plan``. It calculates from tables and published figures and runs no model; the
simulation of whole fleets is not here.
"""
