"""What other programs wrote and read: presets, configs, checkpoints and translations."""
