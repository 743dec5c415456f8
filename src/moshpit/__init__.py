"""Moshpit: train PyTorch models on many unreliable machines, without a master."""
