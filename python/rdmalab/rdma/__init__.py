# SPDX-License-Identifier: Apache-2.0
"""Verbs on a node: devices, GIDs, queue pairs, and the exchange that joins two ends.

Everything here runs on nodes: the standard library, ``pyverbs`` and iproute2 are all it
needs there. ``pyverbs`` is imported inside functions, because its import costs a second
under emulation and most commands do not need it.
"""
