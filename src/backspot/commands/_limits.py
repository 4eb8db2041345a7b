"""What ``--sort`` knows of a device's limits."""

ORDERS = {"headroom": "the device time it would save near the peak"}
