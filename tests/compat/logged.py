"""One fit with upstream's loggers on, in a process without pytest: under it upstream has no logger.

`python tests/compat/logged.py stock|replaying ARGUMENTS SETTINGS KEYS`, the last three as JSON. Prints one line that
begins with `FOUND `: what a callback of the user's saw of the trainer whenever an epoch ended, and the report.
"""

import json
import sys

from ultralytics import SETTINGS
from ultralytics.models.yolo.detect import DetectionTrainer

kind, args, settings, keys = sys.argv[1], *map(json.loads, sys.argv[2:])
SETTINGS.update(settings)
Trainer = DetectionTrainer
if kind == "replaying":
    from detgraph.trainer import LightningDetectionTrainer as Trainer
    from emulator import EmulatingRecorder

    Trainer.recorder = EmulatingRecorder()

seen = []


def watch(trainer):
    seen.append([sorted(trainer.lr), sorted(trainer.metrics), sorted(trainer.label_loss_items(trainer.tloss))])


trainer = Trainer(overrides={**args, **keys})
trainer.add_callback("on_train_epoch_end", watch)
trainer.add_callback("on_fit_epoch_end", watch)
trainer.train()
report = None if kind == "stock" else trainer.capture_report.to_dict()
print("FOUND", json.dumps({"seen": seen, "report": report, "folder": str(trainer.save_dir)}))
