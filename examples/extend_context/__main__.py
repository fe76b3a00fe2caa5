"""From 256 to 1024 tokens with every law: ``python examples/extend_context``, in ten minutes."""

from program import main

if __name__ == "__main__":
    main()
