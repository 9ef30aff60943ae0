# SPDX-License-Identifier: Apache-2.0
# One line each; the logic is in rdmalab and in tools/.
KERNEL ?= stock
RDMALAB = .venv/bin/rdmalab

.PHONY: help setup modules kernel vm-test test test-all lint unit bench update clean

help:      ## what can be made
	@sed -n 's/^\([a-z-]*\): *[^#]*## /  \1\t/p' Makefile | expand -t 14
setup: .venv/.stamp ## build the sysroot and fetch the kernel, with no manual step
	@$(RDMALAB) setup --kernel $(KERNEL)
modules: .venv/.stamp ## build everything under kernel/ for KERNEL=stock|lts
	@$(RDMALAB) modules --kernel $(KERNEL)
kernel: .venv/.stamp ## fetch (or build) the kernel KERNEL=stock|lts
	@$(RDMALAB) kernel --kernel $(KERNEL)
vm-test: .venv/.stamp ## boot two nodes, measure rxe and tcp with probes, smoke-test each module
	@$(RDMALAB) vm-test --kernel $(KERNEL)
test: .venv/.stamp ## lint, unit, playbook and VM suites on stock
	@tools/test stock
test-all: .venv/.stamp ## test, and the VM suite on every other kernel
	@tools/test stock lts
lint: .venv/.stamp ## ruff, mypy --strict, checkpatch and sparse
	@tools/lint
unit: .venv/.stamp ## the unit tests alone: seconds, no root
	@.venv/bin/pytest tests/unit
bench: .venv/.stamp ## latency, bandwidth, instructions and probe overhead, with spreads
	@tools/bench $(KERNEL)
update: .venv/.stamp ## look for newer packages and kernels than the lock file's
	@$(RDMALAB) update
clean:     ## delete what was built (the lock file and results stay)
	@tools/clean
.venv/.stamp: pyproject.toml tools/venv
	@tools/venv
