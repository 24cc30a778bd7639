"""`python -m detgraph`: the `yolo` command line, as `python -m detgraph.trainer`. The namespace has nothing else."""

from detgraph.trainer.cli import main

if __name__ == "__main__":
    main()
