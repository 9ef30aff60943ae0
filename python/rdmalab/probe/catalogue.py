# SPDX-License-Identifier: Apache-2.0
"""What the probes are: what each measures, and which functions it sits on.

A *role* is a place in the driver; the function that plays it has other names in other
kernels. A probe hooks handlers of its ``.bcc.c`` file into roles, at the entry of the
function or at its return, so that two probes on one function share one program there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rdmalab.errors import UsageError

MODULE = "rdma_rxe"


@dataclass(frozen=True)
class Role:
    """``names``: the function's names, newest first. ``arguments``: how many it takes (its
    return value is found behind them). ``returns``: whether it returns a value."""

    name: str
    names: tuple[str, ...]
    arguments: int
    does: str
    returns: bool = True


ROLES = {
    role.name: role
    for role in (
        Role("post", ("rxe_post_send",), 3, "takes the doorbell of a posted send"),
        Role("send", ("rxe_requester",), 1, "builds one request packet of a queue pair"),
        Role("transmit", ("rxe_xmit_packet",), 3, "hands one packet to the network stack"),
        Role("arrive", ("rxe_rcv",), 1, "takes one packet from the network stack", returns=False),
        # rxe_responder until 6.9
        Role("receive", ("rxe_receiver", "rxe_responder"), 1, "serves one received request"),
        Role("complete", ("rxe_completer",), 1, "handles one response, completes work requests"),
        Role("deliver", ("rxe_cq_post",), 3, "writes one completion into a completion queue"),
        Role("destroy", ("rxe_destroy_qp",), 2, "destroys a queue pair"),
    )
}

STAGES = ("post", "send", "transmit", "arrive", "receive", "complete")
"""The roles that stage_time times, in the order in which a message meets them."""

IDLE_STAGES = frozenset({"send", "receive", "complete"})
"""Those that are called until they return non-zero: nothing (more) to do."""

WORK_FUNCTION = ("do_work",)
"""The function of the driver's work items: work queues came to rxe with 6.5, before that
its tasks were tasklets."""

TASK_FUNCTIONS = ("rxe_sender", "rxe_receiver", "rxe_requester", "rxe_completer", "rxe_responder")
"""What a work item may run: sender and receiver since 6.10, the last three before."""

OPCODES = (
    "WRITE",
    "WRITE_WITH_IMM",
    "SEND",
    "SEND_WITH_IMM",
    "READ",
    "CMP_AND_SWP",
    "FETCH_AND_ADD",
    "LOCAL_INV",
    "BIND_MW",
    "SEND_WITH_INV",
    "TSO",
    "READ_WITH_INV",
    "MASKED_CMP_AND_SWP",
    "MASKED_FETCH_AND_ADD",
    "FLUSH",
    "ATOMIC_WRITE",
    "other",
)
"""By number of enum ib_uverbs_wr_opcode, without its prefixes; the last one takes those that
only the kernel can post (REG_MR)."""


@dataclass(frozen=True)
class Hook:
    """``handler``: the function in the probe's file. ``slots``: how many histograms the
    handler is told, as arguments behind the call. ``thread``: whether it uses what is kept
    of the thread that runs."""

    role: str
    at: str  # enter | leave
    handler: str
    slots: int = 0
    thread: bool = True


@dataclass(frozen=True)
class Probe:
    """``start`` and ``end`` say exactly between which points a value is taken.

    ``hooks`` sit on functions of the driver; where they are ``independent`` each role is
    measured by itself, else one missing role is the whole probe missing. ``tracepoints`` are
    ``(tracepoint, program)``, ``uretprobe`` is a handler on the return of the provider's poll
    function. ``offsets`` are the constants that the programs need from the driver's private
    structures: name to "structure.member", summed where there are several; a probe with
    hooks that has some loads through typed pointers and cannot go by name.
    """

    name: str
    unit: str
    measures: str
    start: str
    end: str
    split: str
    hooks: tuple[Hook, ...] = ()
    tracepoints: tuple[tuple[str, str], ...] = ()
    uretprobe: str = ""
    independent: bool = False
    offsets: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def source(self) -> str:
        """The name of the probe's program file in this package."""
        return f"{self.name}.bcc.c"


_STAGE_HOOKS = tuple(
    hook
    for role in STAGES
    for hook in (
        Hook(role, "enter", "stage_time_enter", slots=1),
        Hook(role, "leave", "stage_time_leave", slots=2),
    )
)

PROBES = {
    probe.name: probe
    for probe in (
        Probe(
            name="post_to_completion",
            unit="ns",
            measures="time from post to completion of each signalled, successful work request",
            start="the driver gets the doorbell (rxe_post_send), or its requester first finds the"
            " work request in the send queue, whichever is earlier; the building of the request"
            " in user space and the system call are before it",
            end="the driver's completer starts to write the completion (rxe_cq_post); the wake-up"
            " or poll of the program is after it",
            split="opcode of the work request",
            hooks=(
                Hook("post", "enter", "post_to_completion_doorbell", thread=False),
                Hook("send", "enter", "post_to_completion_request", thread=False),
                Hook("complete", "enter", "post_to_completion_enter"),
                Hook("complete", "leave", "post_to_completion_leave"),
                Hook("deliver", "enter", "post_to_completion_complete", slots=1),
                Hook("destroy", "enter", "post_to_completion_destroy", thread=False),
            ),
            offsets=(
                ("RXE_QP_SQ_QUEUE", ("rxe_qp.sq", "rxe_sq.queue")),
                ("RXE_QP_NEXT", ("rxe_qp.req", "rxe_req_info.wqe_index")),
                ("RXE_QUEUE_BUF", ("rxe_queue.buf",)),
                ("RXE_QUEUE_LOG2_ELEM_SIZE", ("rxe_queue.log2_elem_size",)),
                ("RXE_QUEUE_INDEX_MASK", ("rxe_queue.index_mask",)),
                ("RXE_QUEUE_INDEX", ("rxe_queue.index",)),
                ("RXE_QUEUE_BUF_PRODUCER", ("rxe_queue_buf.producer_index",)),
                ("RXE_QUEUE_BUF_DATA", ("rxe_queue_buf.data",)),
                ("RXE_WQE_OPCODE", ("rxe_send_wqe.wr", "rxe_send_wr.opcode")),
            ),
        ),
        Probe(
            name="stage_time",
            unit="ns",
            measures="time inside each stage of the driver",
            start="entry of the stage's function",
            end="return of the stage's function; interrupts and preemption in between count",
            split="function; calls that found nothing to do (non-zero return) are kept apart as"
            " 'FUNCTION idle'",
            hooks=_STAGE_HOOKS,
            independent=True,
        ),
        Probe(
            name="completions_per_poll",
            unit="count",
            measures="completions that one poll of a completion queue returned (0: in vain)",
            start="one call of the provider library's poll function (ibv_poll_cq of any program on"
            " the node; polls through ibv_start_poll are not seen)",
            end="its return",
            split="provider library",
            uretprobe="completions_per_poll_return",
        ),
        Probe(
            name="work_delay",
            unit="ns",
            measures="scheduling delay of the driver's work queue (rxe_wq)",
            start="the task's work is queued (tracepoint workqueue_queue_work)",
            end="a worker starts to run it (tracepoint workqueue_execute_start)",
            split="task function",
            tracepoints=(
                ("workqueue_queue_work", "work_delay_queue"),
                ("workqueue_execute_start", "work_delay_start"),
            ),
            offsets=(("RXE_TASK_FUNC", ("rxe_task.func",)),),
        ),
    )
}


def select(names: Iterable[str]) -> tuple[Probe, ...]:
    """The probes of these names, each once, in the catalogue's order; all of them where none
    is named. UsageError names an unknown one."""
    wanted = set(names)
    unknown = sorted(wanted - PROBES.keys())
    if unknown:
        raise UsageError(f"no probe named {unknown[0]}", todo=f"there are: {', '.join(PROBES)}")
    return tuple(p for p in PROBES.values() if not wanted or p.name in wanted)
