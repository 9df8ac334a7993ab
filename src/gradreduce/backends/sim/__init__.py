"""The simulated backend: devices on the CPU that compute true values."""
