/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Time from post to completion of each signalled work request.
 *
 * Start: the driver is told of the work request (the doorbell, rxe_post_send), or its
 * requester first finds it in the send queue, whichever is earlier. The queue is mapped
 * into the program that posts, so the driver sees a work request only then.
 * End: the driver's completer starts to write the completion (rxe_cq_post).
 *
 * A work request is known by the address of its element in the send queue, which is its
 * own from post to completion.
 */

BPF_HASH(posted, u64, u64, 32768);
BPF_HASH(send_queue, u64, u32, 4096);

/* status in struct ib_uverbs_wc and struct ib_wc alike */
#define WC_STATUS 8

/* Work requests that one doorbell may announce; more are counted as lost. */
#define POST_LIST 512

struct ring {
	u64 buf;
	u32 shift;
	u32 mask;
};

static __always_inline u64 element(struct ring *ring, u32 index)
{
	return ring->buf + RXE_QUEUE_BUF_DATA + ((u64)(index & ring->mask) << ring->shift);
}

/* Notes the time of every work request between what was seen last and ``producer``. */
static __always_inline void note_posted(struct call *call, u64 qp, u64 queue, u32 mask,
					u32 producer)
{
	struct ring ring;
	u32 next, i, *last;

	ring.buf = read64(queue + RXE_QUEUE_BUF);
	ring.mask = mask;
	ring.shift = read32(queue + RXE_QUEUE_LOG2_ELEM_SIZE) & 31;
	next = read32(queue + RXE_QUEUE_INDEX) & mask;
	/* What was seen last is valid while it lies between consumer and producer; outside, the
	 * queue was reset or is another queue pair's at the same address.
	 */
	last = send_queue.lookup(&qp);
	if (last && ((*last - next) & mask) <= ((producer - next) & mask))
		next = *last;
	if (next == producer)
		return;
	for (i = 0; i < POST_LIST && next != producer; i++) {
		u64 wqe = element(&ring, next);

		if (posted.update(&wqe, &call->now))
			lose(PROBE_POST_TO_COMPLETION, 1);
		next = (next + 1) & mask;
	}
	if (next != producer)
		lose(PROBE_POST_TO_COMPLETION, (producer - next) & mask);
	send_queue.update(&qp, &producer);
}

/* Read, not loaded: the argument is a struct ib_qp, the driver's own lies around it. */
static __always_inline void post_to_completion_doorbell(struct call *call)
{
	u64 queue = read64(call->arg1 + RXE_QP_SQ_QUEUE);
	u32 mask = read32(queue + RXE_QUEUE_INDEX_MASK);
	u64 buf = read64(queue + RXE_QUEUE_BUF);

	note_posted(call, call->arg1, queue, mask, read32(buf + RXE_QUEUE_BUF_PRODUCER) & mask);
}

/* The requester is called more often than there is something new to send: find that out by
 * loads alone.
 */
static __always_inline void post_to_completion_request(struct call *call)
{
	u64 queue = LOAD64(call->arg1 + RXE_QP_SQ_QUEUE);
	u32 mask = LOAD32(queue + RXE_QUEUE_INDEX_MASK);
	u32 producer = LOAD32(LOAD64(queue + RXE_QUEUE_BUF) + RXE_QUEUE_BUF_PRODUCER) & mask;

	if (producer != LOAD32(call->arg1 + RXE_QP_NEXT))
		note_posted(call, call->arg1, queue, mask, producer);
}

static __always_inline void post_to_completion_destroy(struct call *call)
{
	u64 qp = call->arg1;

	send_queue.delete(&qp);
}

/* rxe_cq_post is told the completion queue, not the queue pair: remember whose completer
 * runs in this thread. Outside of a completer it is a receive that completes.
 */
static __always_inline void post_to_completion_enter(struct call *call)
{
	if (call->thread)
		call->thread->completing = LOAD64(call->arg1 + RXE_QP_SQ_QUEUE);
	else
		lose(PROBE_POST_TO_COMPLETION, 1);
}

static __always_inline void post_to_completion_leave(struct call *call)
{
	if (call->thread)
		call->thread->completing = 0;
}

static __always_inline void post_to_completion_complete(struct call *call, u32 slot)
{
	struct ring ring;
	u64 queue, *start, wqe;
	u32 opcode;

	queue = call->thread ? call->thread->completing : 0;
	if (!queue)
		return;
	/* A flushed or failed work request has no latency. */
	if (read32(call->arg2 + WC_STATUS))
		return;
	ring.buf = read64(queue + RXE_QUEUE_BUF);
	ring.shift = read32(queue + RXE_QUEUE_LOG2_ELEM_SIZE) & 31;
	ring.mask = read32(queue + RXE_QUEUE_INDEX_MASK);
	/* The consumer index has already moved past the element. */
	wqe = element(&ring, read32(queue + RXE_QUEUE_INDEX) - 1);
	start = posted.lookup(&wqe);
	if (!start) {
		lose(PROBE_POST_TO_COMPLETION, 1);
		return;
	}
	/* above 15 are those that only the kernel posts */
	opcode = read32(wqe + RXE_WQE_OPCODE);
	record(slot + (opcode < 16 ? opcode : 16), call->now - *start);
	posted.delete(&wqe);
}
