"""`python -m mistral_paged` is the command line."""

from mistral_paged.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
