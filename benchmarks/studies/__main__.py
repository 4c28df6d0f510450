"""`python -m benchmarks.studies STUDY -o FILE`"""

import sys

from benchmarks.studies.experiments import main

sys.exit(main(sys.argv[1:]))
