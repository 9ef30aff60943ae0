# SPDX-License-Identifier: Apache-2.0
"""Unit tests: seconds, no root, no VM."""

from hypothesis import settings

# A busy machine is no failure: no example has a time limit of its own.
settings.register_profile("rdmalab", deadline=None)
settings.load_profile("rdmalab")
