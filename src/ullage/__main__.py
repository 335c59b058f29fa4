"""``python -m ullage`` is ``ullage``."""

from ullage.cli import main

if __name__ == "__main__":
    main()
