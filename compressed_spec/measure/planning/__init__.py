"""What speculation would bring on a machine, computed from dimensions, rates and measured acceptance."""
