"""Pipeline: a network that is too large for one device, cut into stages on several devices."""
