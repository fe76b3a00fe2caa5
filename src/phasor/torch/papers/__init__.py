"""What the papers build of rotations, as PyTorch modules and measurements."""
