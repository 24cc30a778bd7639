"""For processes that must not import detgraph: `runpy.run_path` of this file makes `trainer/` importable as `by_path`.

Only what imports nothing of ours but its neighbours can be taken: `by_path.output`, and of `by_path.golden` digests,
file, record, stock and watch. They are copies, not detgraph's own objects.
"""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("by_path", __doc__)
package.__path__ = [str(Path(__file__).resolve().parent.parent)]
sys.modules.setdefault(package.__name__, package)
