"""Adds gradients up: terms on one device, replicas across devices, arrivals over time."""
