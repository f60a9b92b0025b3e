"""Training of the bundled demo checkpoint: corpus, a dense forward over packed rows, losses, loop, export, gate."""
