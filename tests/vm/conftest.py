# SPDX-License-Identifier: Apache-2.0
"""VM tests run on a lab: fixtures lab, node0, node1 and the markers of the plugin."""

pytest_plugins = ["rdmalab.lab.pytest_plugin"]
