"""Meshes over several processes: finds the processes, and moves bytes between them."""
