# SPDX-License-Identifier: Apache-2.0
"""rdmalab: a lab for RDMA and kernel-offload drivers.

This module and everything under ``rdma``, ``measure.node`` and ``probe`` runs on
nodes too and needs only the standard library there.
"""

__version__ = "0.1.0"
