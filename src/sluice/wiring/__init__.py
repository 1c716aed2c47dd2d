"""The composition roots: settings to running objects, by explicit construction.

``gateway`` makes the gateway process, ``replica`` and ``simulated_replica`` a replica process.
Nothing else names concrete classes of several layers.
"""
