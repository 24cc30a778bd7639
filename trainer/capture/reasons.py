"""Why a step is eager, where no guard, check or error words it: every other reason names what was found.

Each is a key of ``eager`` in a fit's report, and explained in docs/reasons.md.
"""

RECORDING = "step that was recorded"
OTHER_SHAPE = "batch of another shape"
TAIL = "smaller batch"
TOO_EARLY = "before the step that may be recorded"
NOTHING_TO_DO = "step without orthogonalization"
OVER_CAPACITY = "batch that needs more room than was recorded"
RETIRED = "step in which the recording was retired"
NOT_IN_PLACE = "muon_update was replaced by somebody else"
