"""``python -m gptoss_debug`` is the command ``gptoss-debug``."""

from gptoss_debug.cli import main

if __name__ == "__main__":
    main()
