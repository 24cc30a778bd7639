"""Python runs this when a process of the tests starts: as far as it can tell, the machine has two cores.

Upstream gives every fit on a CPU a thread for each core but one, eight at most, whatever was set before. Fits side by
side then wait for one another's threads, several times as long as they compute, and sums are added up in an order that
depends on the machine. Of two cores it makes one thread, and loader workers where a test wants them.
"""

import os

os.cpu_count = lambda: 2
