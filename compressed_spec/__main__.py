"""`python -m compressed_spec`, for torchrun and for checkouts that are not installed."""

from compressed_spec.cli import main

if __name__ == "__main__":
    main()
