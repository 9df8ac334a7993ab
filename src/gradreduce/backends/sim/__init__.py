"""The simulated backend: devices on the CPU, with true values."""
