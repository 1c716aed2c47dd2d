"""Drivers, text and streams: what turns decisions into effects on one machine."""
