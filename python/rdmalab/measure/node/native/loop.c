// SPDX-License-Identifier: Apache-2.0
/*
 * The timed verbs loop: ping-pong latency and streaming bandwidth.
 *
 * Python makes the queue pairs and brings them to RTS; this file only posts,
 * waits and takes times. Completion queues and channels are reached from the
 * struct ibv_qp. The calls, in order, each at both ends with a barrier of the
 * caller's between them:
 *
 *   loop_layout()   how a queue pair's part of the buffer is cut into slots
 *   loop_prepare()  refuses what cannot work, fills, posts receives, arms CQs
 *   loop_run()      the loop itself; returns at once at a passive target
 *   loop_check()    what one-sided work left in the target's memory
 *
 * A latency iteration makes the system calls that one of perftest's makes: in
 * event mode, per side, post_send, and read() and req_notify for each of the
 * two completions.
 */
#include "common.h"
#include "count_mark.h"

#include <infiniband/verbs.h>
#include <poll.h>

enum loop_op { OP_SEND, OP_WRITE, OP_WRITE_IMM, OP_READ, OP_FETCH_ADD, OP_CMP_SWAP };

static const char *const op_names[] = {
	"send", "write", "write_imm", "read", "fetch_add", "cmp_swap",
};

#define GRH_BYTES 40
#define ALIGN 64
#define MAX_QPS 64
#define MAX_CQS (2 * MAX_QPS)

/* wr_id: queue pair << 48 | flag | message number or receive slot */
#define ID_QP(q) ((uint64_t)(q) << 48)
#define ID_CREDIT ((uint64_t)1 << 47)
#define ID_LOW ((uint64_t)0xffffffffff)

struct loop_qp {
	struct ibv_qp *qp;
	struct ibv_ah *ah;		/* UD only, else NULL */
	uint32_t remote_qpn;		/* UD only */
	uint32_t remote_qkey;		/* UD only */
	uint64_t remote_addr;		/* where this queue pair's part begins at the peer */
	uint32_t rkey;
	uint32_t lkey;
	uint8_t *base;			/* this queue pair's part of the local buffer */
};

struct loop_job {
	uint64_t struct_bytes;		/* sizeof(struct loop_job), checked */
	uint32_t op, bandwidth, event, initiator, two_way, qps;
	uint32_t inline_max, signal_every;
	uint32_t tx_slots, rx_slots, mtu;
	int32_t control_fd;		/* -1: none */
	uint64_t size, iterations, warmup, seed;
	uint64_t idle_ns, total_ns;
	struct loop_qp *qp;
	uint64_t *samples;		/* `iterations` of them, latency at the initiator */
	/* results */
	uint64_t sample_count, elapsed_ns, bytes;
	uint64_t tx_messages, rx_messages, tx_credits, rx_credits;
	uint64_t events, polls, completions, lost_events;
	int32_t wc_status, vendor_err;
	char error[ERROR_BYTES];
};

struct cq_state {
	struct ibv_cq *cq;
	unsigned int unread;		/* events read from the channel for this CQ, not yet used */
	unsigned int unacked;
};

struct flow {				/* one queue pair in one direction each */
	uint64_t posted, done, credited;	/* what this side sends */
	uint64_t arrived, announced;		/* what it receives */
	uint64_t credits_out;			/* credit sends in flight */
};

struct run {
	struct loop_job *job;
	struct watchdog dog;
	struct cq_state cq[MAX_CQS];
	unsigned int cqs;
	struct cq_state *send_cq, *recv_cq;	/* of queue pair 0, for latency */
	struct flow flow[MAX_QPS];
	uint64_t stride, total;
	uint64_t window;		/* messages in flight without a credit (UC, UD) */
	int credits;			/* UC and UD say what arrived; RC's acks do */
	int service;
};

__attribute__((format(printf, 2, 3)))
static int fail(struct loop_job *job, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(job->error, sizeof(job->error), format, args);
	va_end(args);
	return -1;
}

static const char *service_name(int type)
{
	switch (type) {
	case IBV_QPT_RC: return "RC";
	case IBV_QPT_UC: return "UC";
	case IBV_QPT_UD: return "UD";
	default: return "unknown";
	}
}

static int is_atomic(uint32_t op)
{
	return op == OP_FETCH_ADD || op == OP_CMP_SWAP;
}

static int has_receiver(uint32_t op)
{
	return op == OP_SEND || op == OP_WRITE_IMM;
}

static uint64_t slot_stride(const struct loop_job *job)
{
	return (job->size + GRH_BYTES + ALIGN - 1) / ALIGN * ALIGN;
}

static uint8_t *tx_slot(const struct run *r, unsigned int q, uint64_t n)
{
	return r->job->qp[q].base + n % r->job->tx_slots * r->stride;
}

static uint64_t rx_offset(const struct run *r, uint64_t slot)
{
	return (r->job->tx_slots + slot) * r->stride;
}

static uint8_t *rx_slot(const struct run *r, unsigned int q, uint64_t slot)
{
	return r->job->qp[q].base + rx_offset(r, slot);
}

/* Where message n lands by RDMA at the peer, whose layout is ours. */
static uint64_t remote_slot(const struct run *r, unsigned int q, uint64_t n)
{
	return r->job->qp[q].remote_addr + rx_offset(r, n % r->job->tx_slots);
}

/* How many bytes of buffer one queue pair needs. */
uint64_t loop_layout(const struct loop_job *job)
{
	return (uint64_t)(job->tx_slots + job->rx_slots) * slot_stride(job);
}

uint64_t loop_struct_bytes(void)
{
	return sizeof(struct loop_job);
}

/* Does this side send, and does it receive, messages of the operation? */
static int sends(const struct loop_job *job)
{
	if (job->bandwidth)
		return job->initiator || job->two_way;
	return job->initiator || has_receiver(job->op) || job->op == OP_WRITE;
}

static int receives(const struct loop_job *job)
{
	if (job->bandwidth)
		return !job->initiator || job->two_way;
	return 1;
}

/* A target that only offers its memory. */
static int is_passive(const struct run *r)
{
	const struct loop_job *job = r->job;

	if (sends(job) || has_receiver(job->op))
		return 0;
	return !(job->op == OP_WRITE && r->credits);
}

static int setup(struct run *r, struct loop_job *job)
{
	unsigned int q, i;

	memset(r, 0, sizeof(*r));
	r->job = job;
	if (job->struct_bytes != sizeof(*job))
		return fail(job, "loop.so and its caller disagree about struct loop_job: %llu and %zu bytes",
			    (unsigned long long)job->struct_bytes, sizeof(*job));
	if (job->qps < 1 || job->qps > MAX_QPS)
		return fail(job, "%u queue pairs: 1 to %d are possible", job->qps, MAX_QPS);
	if (!job->tx_slots || !job->rx_slots)
		return fail(job, "no slots in the buffer");
	r->stride = slot_stride(job);
	r->service = job->qp[0].qp->qp_type;
	r->credits = job->bandwidth && r->service != IBV_QPT_RC;
	r->window = job->tx_slots;
	/* One more than was asked: an untimed last one, checked in every byte. */
	r->total = job->warmup + job->iterations + 1;
	for (q = 0; q < job->qps; q++) {
		struct ibv_cq *both[2] = { job->qp[q].qp->send_cq, job->qp[q].qp->recv_cq };
		unsigned int b;

		for (b = 0; b < 2; b++) {
			for (i = 0; i < r->cqs && r->cq[i].cq != both[b]; i++)
				;
			if (i == r->cqs)
				r->cq[r->cqs++].cq = both[b];
			if (!q && !b)
				r->send_cq = &r->cq[i];
			if (!q && b)
				r->recv_cq = &r->cq[i];
		}
	}
	return 0;
}

static int refuse(struct run *r)
{
	struct loop_job *job = r->job;
	const char *service = service_name(r->service);
	unsigned int i;

	if (job->op > OP_CMP_SWAP)
		return fail(job, "unknown operation %u", job->op);
	if (!job->size)
		return fail(job, "size 0: a message needs a byte to be checked by");
	if (r->service != IBV_QPT_RC && r->service != IBV_QPT_UC && r->service != IBV_QPT_UD)
		return fail(job, "a queue pair of type %d is not measured", r->service);
	if (r->service == IBV_QPT_UD && job->op != OP_SEND)
		return fail(job, "%s is not defined for UD: only send is", op_names[job->op]);
	if (r->service != IBV_QPT_RC && (job->op == OP_READ || is_atomic(job->op)))
		return fail(job, "%s is not defined for %s: it needs RC", op_names[job->op], service);
	if (r->service == IBV_QPT_UD && job->size > job->mtu)
		return fail(job, "size %llu over UD: a message is one packet, at most %u bytes here",
			    (unsigned long long)job->size, job->mtu);
	if (is_atomic(job->op) && job->size != 8)
		return fail(job, "%s is on 8 bytes, not %llu", op_names[job->op],
			    (unsigned long long)job->size);
	if (!job->bandwidth && job->qps != 1)
		return fail(job, "latency is measured on one queue pair, not %u", job->qps);
	if (!job->bandwidth && job->two_way)
		return fail(job, "two-way is for bandwidth");
	if (!job->bandwidth && job->event && job->op == OP_WRITE)
		return fail(job, "write latency has no event mode: a write completes nothing at the target; poll, or use write_imm");
	for (i = 0; job->event && i < r->cqs; i++)
		if (!r->cq[i].cq->channel)
			return fail(job, "event mode needs completion queues with a channel");
	return 0;
}

static int post_recv(struct run *r, unsigned int q, uint64_t slot)
{
	struct loop_job *job = r->job;
	struct ibv_sge sge = {
		.addr = (uintptr_t)rx_slot(r, q, slot),
		.length = (uint32_t)r->stride,
		.lkey = job->qp[q].lkey,
	};
	struct ibv_recv_wr wr = {
		.wr_id = ID_QP(q) | slot,
		/* An immediate of a write takes a receive and none of its buffer,
		 * where the write's own bytes are. */
		.sg_list = job->op == OP_SEND ? &sge : NULL,
		.num_sge = job->op == OP_SEND,
	};
	struct ibv_recv_wr *bad;
	int err = ibv_post_recv(job->qp[q].qp, &wr, &bad);

	if (err)
		return fail(job, "ibv_post_recv: %s (queue pair %u, receive %llu of %u)",
			    strerror(err), q, (unsigned long long)slot, job->rx_slots);
	return 0;
}

static int arm(struct run *r, struct cq_state *c)
{
	int err = ibv_req_notify_cq(c->cq, 0);

	return err ? fail(r->job, "ibv_req_notify_cq: %s", strerror(err)) : 0;
}

int loop_prepare(struct loop_job *job)
{
	struct run r;
	unsigned int q, i;
	uint64_t slot;

	job->error[0] = 0;
	if (setup(&r, job) || refuse(&r))
		return -1;
	for (q = 0; q < job->qps; q++) {
		memset(job->qp[q].base, 0, loop_layout(job));
		if (job->op == OP_READ && receives(job))
			for (slot = 0; slot < job->tx_slots; slot++)
				fill_message(rx_slot(&r, q, slot), job->size, slot + 1, job->seed);
		if (has_receiver(job->op) || r.credits)
			for (slot = 0; slot < job->rx_slots; slot++)
				if (post_recv(&r, q, slot))
					return -1;
	}
	for (i = 0; job->event && i < r.cqs; i++)
		if (arm(&r, &r.cq[i]))
			return -1;
	return 0;
}

static int bad_completion(struct run *r, const struct ibv_wc *wc)
{
	struct loop_job *job = r->job;

	job->wc_status = wc->status;
	job->vendor_err = (int32_t)wc->vendor_err;
	return fail(job, "work completion failed: %s (status %d, vendor error 0x%x, queue pair %u, after %llu messages)",
		    ibv_wc_status_str(wc->status), wc->status, wc->vendor_err,
		    (unsigned int)(wc->wr_id >> 48), (unsigned long long)r->dog.progress);
}

static int timed_out(struct run *r, const char *waiting_for)
{
	struct loop_job *job = r->job;
	const struct flow *f = &r->flow[0];
	char why[128];

	expired_text(&r->dog, why, sizeof(why), waiting_for, job->idle_ns, job->total_ns);
	return fail(job, "%s (sent %llu, completed %llu, received %llu of %llu)%s", why,
		    (unsigned long long)f->posted, (unsigned long long)f->done,
		    (unsigned long long)f->arrived, (unsigned long long)r->total,
		    r->service == IBV_QPT_RC ? "" : "; UC and UD do not send a lost message again");
}

static int post(struct run *r, unsigned int q, uint64_t n, int signaled, int with_imm)
{
	struct loop_job *job = r->job;
	struct loop_qp *p = &job->qp[q];
	uint8_t *message = tx_slot(r, q, n);
	struct ibv_sge sge = {
		.addr = (uintptr_t)message,
		.length = (uint32_t)job->size,
		.lkey = p->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = ID_QP(q) | n,
		.sg_list = &sge,
		.num_sge = 1,
		.send_flags = signaled ? IBV_SEND_SIGNALED : 0,
	};
	struct ibv_send_wr *bad;
	int err;

	switch (job->op) {
	case OP_SEND:
		wr.opcode = IBV_WR_SEND;
		if (r->service == IBV_QPT_UD) {
			wr.wr.ud.ah = p->ah;
			wr.wr.ud.remote_qpn = p->remote_qpn;
			wr.wr.ud.remote_qkey = p->remote_qkey;
		}
		break;
	case OP_WRITE:
	case OP_WRITE_IMM:
		wr.opcode = with_imm || job->op == OP_WRITE_IMM ?
			IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
		wr.imm_data = __builtin_bswap32((uint32_t)(n + 1));
		wr.wr.rdma.remote_addr = remote_slot(r, q, n);
		wr.wr.rdma.rkey = p->rkey;
		break;
	case OP_READ:
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = remote_slot(r, q, n);
		wr.wr.rdma.rkey = p->rkey;
		break;
	default:
		wr.opcode = job->op == OP_FETCH_ADD ?
			IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
		/* One counter a queue pair, so that every old value is known. */
		wr.wr.atomic.remote_addr = remote_slot(r, q, 0);
		wr.wr.atomic.rkey = p->rkey;
		wr.wr.atomic.compare_add = job->op == OP_FETCH_ADD ? 1 : n;
		wr.wr.atomic.swap = n + 1;
		break;
	}
	if (job->op <= OP_WRITE_IMM && job->size <= job->inline_max)
		wr.send_flags |= IBV_SEND_INLINE;
	err = ibv_post_send(p->qp, &wr, &bad);
	if (err)
		return fail(job, "ibv_post_send: %s (queue pair %u, message %llu)", strerror(err), q,
			    (unsigned long long)n + 1);
	r->flow[q].posted++;
	return 0;
}

/* Every byte is checked in a few first messages and in the last one. */
static int is_full(const struct run *r, uint64_t n)
{
	return n + 1 == r->total || n < (r->job->warmup < FULL_CHECKS ? r->job->warmup : FULL_CHECKS);
}

static void make_message(struct run *r, unsigned int q, uint64_t n)
{
	struct loop_job *job = r->job;
	uint8_t *message = tx_slot(r, q, n);

	if (job->op == OP_READ || is_atomic(job->op)) {
		/* what must be overwritten by the answer */
		if (is_full(r, n))
			memset(message, 0xee, job->size);
		put_stamp(message, job->size, ~(uint64_t)0);
	} else if (is_full(r, n)) {
		fill_message(message, job->size, n + 1, job->seed);
	} else {
		put_stamp(message, job->size, n + 1);
	}
}

static int check_arrived(struct run *r, const uint8_t *message, uint64_t n)
{
	struct loop_job *job = r->job;
	int64_t at;

	if (!has_stamp(message, job->size, n + 1))
		return fail(job, "message %llu arrived where %llu was expected: bytes were lost, or came from elsewhere",
			    (unsigned long long)get_stamp(message, job->size),
			    (unsigned long long)n + 1);
	if (!is_full(r, n))
		return 0;
	at = check_message(message, job->size, n + 1, job->seed);
	if (at >= 0)
		return fail(job, "message %llu differs from what was sent at byte %lld of %llu",
			    (unsigned long long)n + 1, (long long)at, (unsigned long long)job->size);
	return 0;
}

/* What a read or an atomic brought back. */
static int check_answer(struct run *r, unsigned int q, uint64_t n)
{
	struct loop_job *job = r->job;
	const uint8_t *message = tx_slot(r, q, n);
	uint64_t old, at;

	if (is_atomic(job->op)) {
		memcpy(&old, message, sizeof(old));
		if (old != n)
			return fail(job, "%s number %llu found %llu in the target's memory, not %llu",
				    op_names[job->op], (unsigned long long)n + 1,
				    (unsigned long long)old, (unsigned long long)n);
		return 0;
	}
	at = n % job->tx_slots + 1;
	if (!has_stamp(message, job->size, at))
		return fail(job, "read %llu completed without the target's bytes",
			    (unsigned long long)n + 1);
	if (is_full(r, n) && check_message(message, job->size, at, job->seed) >= 0)
		return fail(job, "read %llu brought other bytes than the target holds",
			    (unsigned long long)n + 1);
	return 0;
}

/*
 * Takes one event off the channel of *c* and books it to its CQ, which may be
 * another one if the two share a channel. Returns 1 when interrupted.
 */
static int read_event(struct run *r, struct cq_state *c)
{
	struct ibv_cq *cq;
	void *context;
	unsigned int i;

	if (ibv_get_cq_event(c->cq->channel, &cq, &context)) {
		if (errno == EINTR || errno == EAGAIN)
			return 1;
		return fail(r->job, "ibv_get_cq_event: %s", strerror(errno));
	}
	r->job->events++;
	for (i = 0; i < r->cqs && r->cq[i].cq != cq; i++)
		;
	if (i == r->cqs)
		return fail(r->job, "an event of a completion queue that is not ours");
	r->cq[i].unread++;
	r->cq[i].unacked++;
	return 0;
}

/* One completion of *c*, checked for its status. */
static int wait_completion(struct run *r, struct cq_state *c, struct ibv_wc *wc,
			   const char *waiting_for)
{
	struct loop_job *job = r->job;
	int n;

	for (;;) {
		int interrupted = 0;

		if (job->event) {
			while (!c->unread && !interrupted) {
				interrupted = read_event(r, c);
				if (interrupted < 0)
					return -1;
			}
			if (c->unread) {
				c->unread--;
				if (arm(r, c))
					return -1;
			}
		}
		n = ibv_poll_cq(c->cq, 1, wc);
		job->polls++;
		if (n > 0) {
			job->completions++;
			/* Found at a watchdog tick and announced by nobody: it is
			 * counted, not hidden, and the loop goes on. */
			job->lost_events += (uint64_t)interrupted;
			r->dog.progress++;
			return wc->status == IBV_WC_SUCCESS ? 0 : bad_completion(r, wc);
		}
		if (n < 0)
			return fail(job, "ibv_poll_cq failed");
		if (r->dog.expired)
			return timed_out(r, waiting_for);
	}
}

static int wait_sent(struct run *r)
{
	struct ibv_wc wc;

	if (wait_completion(r, r->send_cq, &wc, "completion of posted work"))
		return -1;
	r->flow[0].done++;
	return 0;
}

static int wait_message(struct run *r, uint64_t n)
{
	struct loop_job *job = r->job;
	const uint8_t *message;
	struct ibv_wc wc;
	uint64_t slot;

	if (job->op == OP_WRITE) {
		message = rx_slot(r, 0, n % job->tx_slots);
		while (!has_stamp(message, job->size, n + 1))
			if (r->dog.expired)
				return timed_out(r, "write in memory");
		r->dog.progress++;
		r->flow[0].arrived++;
		return check_arrived(r, message, n);
	}
	if (wait_completion(r, r->recv_cq, &wc, "message"))
		return -1;
	r->flow[0].arrived++;
	slot = wc.wr_id & ID_LOW;
	if (job->op == OP_WRITE_IMM) {
		message = rx_slot(r, 0, n % job->tx_slots);
		if (wc.imm_data != __builtin_bswap32((uint32_t)(n + 1)))
			return fail(job, "immediate %u arrived where %llu was expected",
				    __builtin_bswap32(wc.imm_data), (unsigned long long)n + 1);
	} else {
		uint64_t grh = r->service == IBV_QPT_UD ? GRH_BYTES : 0;

		message = rx_slot(r, 0, slot) + grh;
		if (wc.byte_len != job->size + grh)
			return fail(job, "a message of %u bytes arrived, not %llu", wc.byte_len,
				    (unsigned long long)(job->size + grh));
	}
	if (check_arrived(r, message, n))
		return -1;
	return post_recv(r, 0, slot);
}

static int run_latency(struct run *r)
{
	struct loop_job *job = r->job;
	int answered = job->op == OP_READ || is_atomic(job->op);
	uint64_t n, now, before = 0;

	for (n = 0; n < r->total; n++) {
		count_mark_timed(n, job->warmup, job->iterations);
		if (!job->initiator && wait_message(r, n))
			return -1;
		make_message(r, 0, n);
		if (job->initiator) {
			/* From post to post: nothing that an iteration costs is left
			 * out. The last, untimed one closes the last sample. */
			now = now_ns();
			if (n > job->warmup && job->sample_count < job->iterations)
				job->samples[job->sample_count++] = now - before;
			before = now;
		}
		if (post(r, 0, n, 1, 0) || wait_sent(r))
			return -1;
		if (answered) {
			if (check_answer(r, 0, n))
				return -1;
		} else if (job->initiator && wait_message(r, n)) {
			return -1;
		}
	}
	for (n = 0; n < job->sample_count; n++)
		job->elapsed_ns += job->samples[n];
	job->bytes = job->sample_count * job->size;
	return 0;
}

/* Tells the sender how many of its messages are here: a message of no bytes. */
static int post_credit(struct run *r, unsigned int q)
{
	struct loop_job *job = r->job;
	struct loop_qp *p = &job->qp[q];
	struct flow *f = &r->flow[q];
	struct ibv_send_wr wr = {
		.wr_id = ID_QP(q) | ID_CREDIT,
		.opcode = IBV_WR_SEND_WITH_IMM,
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = __builtin_bswap32((uint32_t)f->arrived),
	};
	struct ibv_send_wr *bad;
	int err;

	if (r->service == IBV_QPT_UD) {
		wr.wr.ud.ah = p->ah;
		wr.wr.ud.remote_qpn = p->remote_qpn;
		wr.wr.ud.remote_qkey = p->remote_qkey;
	}
	err = ibv_post_send(p->qp, &wr, &bad);
	if (err)
		return fail(job, "ibv_post_send of a credit: %s", strerror(err));
	f->announced = f->arrived;
	f->credits_out++;
	job->tx_credits++;
	return 0;
}

static uint64_t credit_every(const struct run *r)
{
	return r->window / 2 ? r->window / 2 : 1;
}

/*
 * Messages that the receiver must be told of: the last of a batch, and the last
 * of a phase. Only a write over UC has to say it (by an immediate); every send
 * is seen by its receiver.
 */
static int is_batch_end(const struct run *r, uint64_t n, uint64_t until)
{
	return (n + 1) % credit_every(r) == 0 || n + 1 == until;
}

static int on_sent(struct run *r, const struct ibv_wc *wc)
{
	unsigned int q = (unsigned int)(wc->wr_id >> 48);
	struct flow *f = &r->flow[q];
	uint64_t n;

	if (wc->wr_id & ID_CREDIT) {
		f->credits_out--;
		return 0;
	}
	/* The queue is ordered: the completion speaks for all before it. */
	for (n = f->done; n <= (wc->wr_id & ID_LOW); n++)
		if ((r->job->op == OP_READ || is_atomic(r->job->op)) && check_answer(r, q, n))
			return -1;
	f->done = (wc->wr_id & ID_LOW) + 1;
	return 0;
}

static int on_received(struct run *r, const struct ibv_wc *wc, uint64_t until)
{
	struct loop_job *job = r->job;
	unsigned int q = (unsigned int)(wc->wr_id >> 48);
	uint64_t slot = wc->wr_id & ID_LOW;
	struct flow *f = &r->flow[q];

	if (wc->opcode == IBV_WC_RECV && wc->wc_flags & IBV_WC_WITH_IMM) {
		f->credited = __builtin_bswap32(wc->imm_data);
		job->rx_credits++;
	} else if (job->op == OP_SEND) {
		uint64_t grh = r->service == IBV_QPT_UD ? GRH_BYTES : 0;

		if (wc->byte_len != job->size + grh)
			return fail(job, "a message of %u bytes arrived, not %llu", wc->byte_len,
				    (unsigned long long)(job->size + grh));
		if (check_arrived(r, rx_slot(r, q, slot) + grh, f->arrived))
			return -1;
		f->arrived++;
	} else {
		uint64_t n = __builtin_bswap32(wc->imm_data);

		if (job->op == OP_WRITE_IMM && r->service == IBV_QPT_RC && n != f->arrived + 1)
			return fail(job, "immediate %llu arrived where %llu was expected",
				    (unsigned long long)n, (unsigned long long)f->arrived + 1);
		/*
		 * A credited writer keeps off these slots until it is told; over
		 * RC later writes may have overwritten them already, and the
		 * target's last check is what proves the bytes.
		 */
		for (; f->arrived < n; f->arrived++)
			if (r->credits &&
			    check_arrived(r, rx_slot(r, q, f->arrived % job->tx_slots), f->arrived))
				return -1;
	}
	if (post_recv(r, q, slot))
		return -1;
	/* ">=": the peer may be a phase ahead while our last credit completes. */
	if (r->credits && f->arrived > f->announced &&
	    (f->arrived - f->announced >= credit_every(r) || f->arrived >= until))
		return post_credit(r, q);
	return 0;
}

/* Polls every CQ once; returns how many completions were there. */
static int drain(struct run *r, uint64_t until)
{
	struct ibv_wc wc[16];
	int n, k, all = 0;
	unsigned int i;

	for (i = 0; i < r->cqs; i++) {
		n = ibv_poll_cq(r->cq[i].cq, 16, wc);
		r->job->polls++;
		if (n < 0)
			return fail(r->job, "ibv_poll_cq failed");
		for (k = 0; k < n; k++) {
			r->job->completions++;
			r->dog.progress++;
			if (wc[k].status != IBV_WC_SUCCESS)
				return bad_completion(r, &wc[k]);
			if (wc[k].opcode & IBV_WC_RECV ? on_received(r, &wc[k], until)
						       : on_sent(r, &wc[k]))
				return -1;
		}
		all += n;
	}
	return all;
}

static int wait_events(struct run *r)
{
	struct pollfd fds[MAX_CQS];
	struct cq_state *of[MAX_CQS];
	unsigned int i, k, n = 0;
	int got;

	for (i = 0; i < r->cqs; i++) {
		for (k = 0; k < n && of[k]->cq->channel != r->cq[i].cq->channel; k++)
			;
		if (k < n)
			continue;
		of[n] = &r->cq[i];
		fds[n].fd = r->cq[i].cq->channel->fd;
		fds[n++].events = POLLIN;
	}
	if (n > 1 && poll(fds, n, -1) < 0)
		return errno == EINTR ? 0 : fail(r->job, "poll: %s", strerror(errno));
	for (k = 0; k < n; k++)
		if (n == 1 || fds[k].revents & POLLIN) {
			got = read_event(r, of[k]);
			if (got < 0)
				return -1;
		}
	for (i = 0; i < r->cqs; i++)
		if (r->cq[i].unread) {
			r->cq[i].unread = 0;
			if (arm(r, &r->cq[i]))
				return -1;
		}
	return 0;
}

static int may_post(const struct run *r, const struct flow *f, uint64_t until)
{
	if (f->posted >= until || f->posted - f->done >= r->job->tx_slots)
		return 0;
	return !r->credits || f->posted - f->credited < r->window;
}

/*
 * Every queue pair's messages up to number *until*: sent and known to have
 * arrived, or received, or both.
 */
static int stream(struct run *r, uint64_t until)
{
	struct loop_job *job = r->job;
	int tx = sends(job), rx = receives(job) && (has_receiver(job->op) || r->credits);
	int idle = 0;

	for (;;) {
		int moved = 0, done = 1, got;
		unsigned int q;

		for (q = 0; q < job->qps; q++) {
			struct flow *f = &r->flow[q];

			while (tx && may_post(r, f, until)) {
				uint64_t n = f->posted;
				int last = n + 1 == until || n + 1 - f->done >= job->tx_slots;
				int tell = r->credits && is_batch_end(r, n, until);

				make_message(r, q, n);
				if (post(r, q, n, last || tell || (n + 1) % job->signal_every == 0,
					 tell))
					return -1;
				moved = 1;
			}
		}
		got = drain(r, until);
		if (got < 0)
			return -1;
		moved |= got;
		for (q = 0; q < job->qps; q++) {
			const struct flow *f = &r->flow[q];

			if (tx && (f->done < until || (r->credits && f->credited < until)))
				done = 0;
			if (rx && (f->arrived < until || f->credits_out))
				done = 0;
		}
		if (done)
			return 0;
		if (moved) {
			idle = 0;
			continue;
		}
		if (r->dog.expired)
			return timed_out(r, tx ? "completion of posted work" : "message");
		/*
		 * CQs were armed when the last event was taken, before they were
		 * polled empty just now, so a completion since then has its event.
		 */
		if (job->event && idle++ && wait_events(r))
			return -1;
	}
}

static int run_bandwidth(struct run *r)
{
	struct loop_job *job = r->job;
	uint64_t start;

	if (job->warmup && stream(r, job->warmup))
		return -1;
	start = now_ns();
	if (stream(r, job->warmup + job->iterations))
		return -1;
	job->elapsed_ns = now_ns() - start;
	if (sends(job))
		job->bytes = job->iterations * job->size * job->qps;
	return stream(r, r->total);
}

int loop_run(struct loop_job *job)
{
	struct run r;
	unsigned int q, i;
	int err;

	job->error[0] = 0;
	job->sample_count = job->elapsed_ns = job->bytes = 0;
	job->tx_messages = job->rx_messages = job->tx_credits = job->rx_credits = 0;
	job->events = job->polls = job->completions = job->lost_events = 0;
	job->wc_status = job->vendor_err = 0;
	if (setup(&r, job) || refuse(&r))
		return -1;
	if (is_passive(&r))
		return 0;
	if (watchdog_start(&r.dog, job->idle_ns, job->total_ns, job->control_fd))
		return fail(job, "the watchdog's timer: %s", strerror(errno));
	err = job->bandwidth ? run_bandwidth(&r) : run_latency(&r);
	watchdog_stop(&r.dog);
	for (q = 0; q < job->qps; q++) {
		job->tx_messages += r.flow[q].posted;
		job->rx_messages += r.flow[q].arrived;
	}
	/* ibv_destroy_cq() waits for ever for an event that was not acknowledged. */
	for (i = 0; i < r.cqs; i++)
		if (r.cq[i].unacked)
			ibv_ack_cq_events(r.cq[i].cq, r.cq[i].unacked);
	return err;
}

/*
 * After both ends have run: what writes and atomics left in this side's memory.
 * Returns 0 where there is nothing of the kind to check.
 */
int loop_check(struct loop_job *job)
{
	struct run r;
	unsigned int q;
	uint64_t n, value;

	job->error[0] = 0;
	if (setup(&r, job))
		return -1;
	if (!job->bandwidth && job->initiator && job->op != OP_WRITE)
		return 0;
	if (job->bandwidth && !receives(job))
		return 0;
	for (q = 0; q < job->qps; q++) {
		if (is_atomic(job->op)) {
			memcpy(&value, rx_slot(&r, q, 0), sizeof(value));
			if (value != r.total)
				return fail(job, "the atomics left %llu in the target's memory, not %llu",
					    (unsigned long long)value, (unsigned long long)r.total);
		}
		if (job->op != OP_WRITE && job->op != OP_WRITE_IMM)
			continue;
		/* Each slot's last message; of the very last one every byte. */
		for (n = r.total > job->tx_slots ? r.total - job->tx_slots : 0; n < r.total; n++)
			if (check_arrived(&r, rx_slot(&r, q, n % job->tx_slots), n))
				return -1;
	}
	return 0;
}
