"""Saving and finding runs: complete or not at all, no pickle, any number of ranks."""
