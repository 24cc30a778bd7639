"""`python -m detgraph.trainer`: the `yolo` command line, whoever owns the script of that name."""

from detgraph.trainer.cli import main

if __name__ == "__main__":
    main()
