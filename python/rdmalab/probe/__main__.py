# SPDX-License-Identifier: Apache-2.0
"""``python3 -m rdmalab.probe`` on a node."""

import sys

from rdmalab.probe.agent import main

sys.exit(main())
