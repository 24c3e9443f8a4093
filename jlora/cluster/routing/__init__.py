"""Routing policies: one file each, pure, for the router and the simulator alike."""
