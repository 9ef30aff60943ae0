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
BPF_HASH(completing, u64, u64, 4096);

/* status in struct ib_uverbs_wc and struct ib_wc alike */
#define WC_STATUS 8

/* The part of struct rxe_queue that is read: up to its last member, index. */
#define RXE_QUEUE_SIZE (RXE_QUEUE_INDEX + 4)

/* Work requests that one doorbell may announce; more are counted as lost. */
#define POST_LIST 512

struct ring {
	u64 buf;
	u32 shift;
	u32 mask;
	u32 consumer;
};

static __always_inline int read_ring(u64 qp, struct ring *ring)
{
	u8 queue[RXE_QUEUE_SIZE] = {};

	if (bpf_probe_read_kernel(queue, sizeof(queue),
				  (void *)read64(qp + RXE_QP_SQ_QUEUE)))
		return -1;
	ring->buf = *(u64 *)(queue + RXE_QUEUE_BUF);
	ring->shift = *(u32 *)(queue + RXE_QUEUE_LOG2_ELEM_SIZE) & 31;
	ring->mask = *(u32 *)(queue + RXE_QUEUE_INDEX_MASK);
	ring->consumer = *(u32 *)(queue + RXE_QUEUE_INDEX);
	return 0;
}

static __always_inline u64 element(struct ring *ring, u32 index)
{
	return ring->buf + RXE_QUEUE_BUF_DATA + ((u64)(index & ring->mask) << ring->shift);
}

static __always_inline void post_to_completion_post(struct call *call)
{
	struct ring ring = {};
	u64 qp = call->arg1;
	u32 producer, next, i, *last;

	if (read_ring(qp, &ring))
		return;
	producer = read32(ring.buf + RXE_QUEUE_BUF_PRODUCER) & ring.mask;
	next = ring.consumer & ring.mask;
	/* What was seen last is valid while it lies between consumer and producer; outside, the
	 * queue was reset or is another queue pair's at the same address.
	 */
	last = send_queue.lookup(&qp);
	if (last && ((*last - next) & ring.mask) <= ((producer - next) & ring.mask))
		next = *last;
	if (next == producer)
		return;
	for (i = 0; i < POST_LIST && next != producer; i++) {
		u64 wqe = element(&ring, next);

		if (posted.update(&wqe, &call->now))
			lose(PROBE_POST_TO_COMPLETION, 1);
		next = (next + 1) & ring.mask;
	}
	if (next != producer)
		lose(PROBE_POST_TO_COMPLETION, (producer - next) & ring.mask);
	send_queue.update(&qp, &producer);
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
	u64 qp = call->arg1;

	if (completing.update(&call->thread, &qp))
		lose(PROBE_POST_TO_COMPLETION, 1);
}

static __always_inline void post_to_completion_leave(struct call *call)
{
	completing.delete(&call->thread);
}

static __always_inline void post_to_completion_complete(struct call *call, u32 slot)
{
	struct ring ring = {};
	u64 *qp, *start, wqe;
	u32 opcode;

	qp = completing.lookup(&call->thread);
	if (!qp || read_ring(*qp, &ring))
		return;
	/* A flushed or failed work request has no latency. */
	if (read32(call->arg2 + WC_STATUS))
		return;
	/* The consumer index has already moved past the element. */
	wqe = element(&ring, ring.consumer - 1);
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
