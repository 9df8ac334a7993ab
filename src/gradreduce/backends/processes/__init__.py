"""Meshes over several processes: how they are found, and how bytes are sent."""
