"""``python -m trtcb`` is the ``trtcb`` command."""

from trtcb.cli.main import main

if __name__ == "__main__":
    main()
