"""Devices, ranks, meshes, and how rows are packed and balanced over them."""
