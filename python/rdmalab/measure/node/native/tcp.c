// SPDX-License-Identifier: Apache-2.0
/*
 * The same measurements over TCP, as the baseline: ping-pong latency and
 * streaming bandwidth on connected sockets that Python made. Samples, warm-up
 * and the check of the bytes are those of loop.c.
 *
 * mode event: latency blocks in recv(), bandwidth in poll(); mode poll: spins
 * on non-blocking calls.
 */
#include "common.h"
#include "count_mark.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#define MAX_CONNECTIONS 64

struct tcp_job {
	uint64_t struct_bytes;
	uint32_t bandwidth, event, initiator, two_way, connections;
	int32_t control_fd;		/* -1: none */
	uint64_t size, iterations, warmup, seed, idle_ns, total_ns;
	const int32_t *fds;
	uint8_t *buffer;		/* tcp_buffer_bytes() of it */
	uint64_t *samples;
	/* results */
	uint64_t sample_count, elapsed_ns, bytes, tx_messages, rx_messages, tx_bytes, rx_bytes;
	char error[ERROR_BYTES];
};

struct stream {				/* one connection */
	uint8_t *tx, *rx;
	uint64_t sent, received;	/* whole messages */
	uint64_t tx_at, rx_at;		/* bytes of the message in hand */
	uint64_t told;			/* messages the peer said have arrived */
	uint64_t answer_left;		/* bytes of our own word still to be sent */
	uint8_t word[8];		/* the peer's, as it comes in */
	uint64_t word_at;
};

struct run {
	struct tcp_job *job;
	struct watchdog dog;
	struct stream stream[MAX_CONNECTIONS];
	uint64_t total;
};

__attribute__((format(printf, 2, 3)))
static int fail(struct tcp_job *job, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(job->error, sizeof(job->error), format, args);
	va_end(args);
	return -1;
}

uint64_t tcp_struct_bytes(void)
{
	return sizeof(struct tcp_job);
}

uint64_t tcp_buffer_bytes(const struct tcp_job *job)
{
	return 2 * job->size * job->connections;
}

static int is_full(const struct run *r, uint64_t n)
{
	return n + 1 == r->total || n < (r->job->warmup < FULL_CHECKS ? r->job->warmup : FULL_CHECKS);
}

static void make_message(struct run *r, uint8_t *message, uint64_t n)
{
	if (is_full(r, n))
		fill_message(message, r->job->size, n + 1, r->job->seed);
	else
		put_stamp(message, r->job->size, n + 1);
}

static int check_arrived(struct run *r, const uint8_t *message, uint64_t n)
{
	struct tcp_job *job = r->job;
	int64_t at;

	if (!has_stamp(message, job->size, n + 1))
		return fail(job, "message %llu arrived where %llu was expected",
			    (unsigned long long)get_stamp(message, job->size),
			    (unsigned long long)n + 1);
	if (!is_full(r, n))
		return 0;
	at = check_message(message, job->size, n + 1, r->job->seed);
	if (at >= 0)
		return fail(job, "message %llu differs from what was sent at byte %lld of %llu",
			    (unsigned long long)n + 1, (long long)at, (unsigned long long)job->size);
	return 0;
}

static int timed_out(struct run *r, const char *waiting_for)
{
	struct tcp_job *job = r->job;
	char why[128];

	expired_text(&r->dog, why, sizeof(why), waiting_for, job->idle_ns, job->total_ns);
	return fail(job, "%s (sent %llu, received %llu of %llu)", why,
		    (unsigned long long)r->stream[0].sent,
		    (unsigned long long)r->stream[0].received, (unsigned long long)r->total);
}

/* What a socket call's result means: 1 try again, -1 failed, 0 fine. */
static int outcome(struct run *r, ssize_t got, const char *call)
{
	if (got > 0)
		return 0;
	if (!got)
		return fail(r->job, "%s: the peer closed the connection (after %llu messages)", call,
			    (unsigned long long)r->stream[0].received);
	if (errno == EINTR || errno == EAGAIN)
		return r->dog.expired ? timed_out(r, "byte") : 1;
	return fail(r->job, "%s: %s", call, strerror(errno));
}

static int send_message(struct run *r, const uint8_t *message)
{
	struct tcp_job *job = r->job;
	int flags = MSG_NOSIGNAL | (job->event ? 0 : MSG_DONTWAIT);
	uint64_t at = 0;
	int got;

	while (at < job->size) {
		ssize_t n = send(job->fds[0], message + at, job->size - at, flags);

		got = outcome(r, n, "send");
		if (got < 0)
			return -1;
		if (!got) {
			at += (uint64_t)n;
			r->dog.progress++;
		}
	}
	r->stream[0].sent++;
	return 0;
}

static int receive_message(struct run *r, uint8_t *message, uint64_t n)
{
	struct tcp_job *job = r->job;
	int flags = job->event ? 0 : MSG_DONTWAIT;
	uint64_t at = 0;
	int got;

	while (at < job->size) {
		ssize_t bytes = recv(job->fds[0], message + at, job->size - at, flags);

		got = outcome(r, bytes, "recv");
		if (got < 0)
			return -1;
		if (!got) {
			at += (uint64_t)bytes;
			r->dog.progress++;
		}
	}
	r->stream[0].received++;
	return check_arrived(r, message, n);
}

static int run_latency(struct run *r)
{
	struct tcp_job *job = r->job;
	struct stream *s = &r->stream[0];
	uint64_t n, now, before = 0;

	for (n = 0; n < r->total; n++) {
		count_mark_timed(n, job->warmup, job->iterations);
		if (!job->initiator && receive_message(r, s->rx, n))
			return -1;
		make_message(r, s->tx, n);
		if (job->initiator) {
			now = now_ns();
			if (n > job->warmup && job->sample_count < job->iterations)
				job->samples[job->sample_count++] = now - before;
			before = now;
		}
		if (send_message(r, s->tx))
			return -1;
		if (job->initiator && receive_message(r, s->rx, n))
			return -1;
	}
	for (n = 0; n < job->sample_count; n++)
		job->elapsed_ns += job->samples[n];
	job->bytes = job->sample_count * job->size;
	return 0;
}

static int sends(const struct tcp_job *job)
{
	return job->initiator || job->two_way;
}

static int receives(const struct tcp_job *job)
{
	return !job->initiator || job->two_way;
}

/*
 * A one-way sender is told by a word of eight bytes that all of a phase has
 * arrived; what lies in socket buffers is not counted as carried. In two-way
 * each side ends when all of the peer's has arrived.
 */
static int push(struct run *r, unsigned int c, uint64_t until, int *moved)
{
	struct tcp_job *job = r->job;
	struct stream *s = &r->stream[c];
	int got;

	while (s->sent < until) {
		ssize_t n;

		if (!s->tx_at)
			make_message(r, s->tx, s->sent);
		n = send(job->fds[c], s->tx + s->tx_at, job->size - s->tx_at,
			 MSG_NOSIGNAL | MSG_DONTWAIT);
		got = outcome(r, n, "send");
		if (got)
			return got < 0 ? -1 : 0;
		*moved = 1;
		s->tx_at += (uint64_t)n;
		if (s->tx_at == job->size) {
			s->tx_at = 0;
			s->sent++;
		}
	}
	return 0;
}

static int pull(struct run *r, unsigned int c, uint64_t until, int *moved)
{
	struct tcp_job *job = r->job;
	struct stream *s = &r->stream[c];
	int got;

	while (s->received < until) {
		ssize_t n = recv(job->fds[c], s->rx + s->rx_at, job->size - s->rx_at, MSG_DONTWAIT);

		got = outcome(r, n, "recv");
		if (got)
			return got < 0 ? -1 : 0;
		*moved = 1;
		s->rx_at += (uint64_t)n;
		if (s->rx_at < job->size)
			continue;
		s->rx_at = 0;
		if (check_arrived(r, s->rx, s->received))
			return -1;
		s->received++;
		if (s->received == until && !job->two_way)
			s->answer_left = sizeof(s->word);
	}
	return 0;
}

static int tell(struct run *r, unsigned int c, int *moved)
{
	struct tcp_job *job = r->job;
	struct stream *s = &r->stream[c];
	uint64_t word = s->received;
	int got;

	while (s->answer_left) {
		ssize_t n = send(job->fds[c], (uint8_t *)&word + sizeof(word) - s->answer_left,
				 s->answer_left, MSG_NOSIGNAL | MSG_DONTWAIT);

		got = outcome(r, n, "send");
		if (got)
			return got < 0 ? -1 : 0;
		*moved = 1;
		s->answer_left -= (uint64_t)n;
	}
	return 0;
}

static int hear(struct run *r, unsigned int c, uint64_t until, int *moved)
{
	struct stream *s = &r->stream[c];
	int got;

	while (s->told < until) {
		ssize_t n = recv(r->job->fds[c], s->word + s->word_at, sizeof(s->word) - s->word_at,
				 MSG_DONTWAIT);

		got = outcome(r, n, "recv");
		if (got)
			return got < 0 ? -1 : 0;
		*moved = 1;
		s->word_at += (uint64_t)n;
		if (s->word_at < sizeof(s->word))
			continue;
		s->word_at = 0;
		memcpy(&s->told, s->word, sizeof(s->told));
		if (s->told != until)
			return fail(r->job, "the peer says that %llu of %llu messages arrived",
				    (unsigned long long)s->told, (unsigned long long)until);
	}
	return 0;
}

static int stream_until(struct run *r, uint64_t until)
{
	struct tcp_job *job = r->job;

	for (;;) {
		struct pollfd fds[MAX_CONNECTIONS];
		int moved = 0, done = 1;
		unsigned int c;

		for (c = 0; c < job->connections; c++) {
			struct stream *s = &r->stream[c];

			if (sends(job) && push(r, c, until, &moved))
				return -1;
			if (receives(job) && (pull(r, c, until, &moved) || tell(r, c, &moved)))
				return -1;
			if (sends(job) && !job->two_way && s->sent == until &&
			    hear(r, c, until, &moved))
				return -1;
			fds[c].fd = job->fds[c];
			fds[c].events = 0;
			if ((sends(job) && s->sent < until) || s->answer_left)
				fds[c].events |= POLLOUT;
			if ((receives(job) && s->received < until) ||
			    (sends(job) && !job->two_way && s->told < until))
				fds[c].events |= POLLIN;
			if (fds[c].events)
				done = 0;
			else
				fds[c].fd = -1;
		}
		if (done)
			return 0;
		if (moved) {
			r->dog.progress++;
			continue;
		}
		if (r->dog.expired)
			return timed_out(r, "byte");
		if (job->event && poll(fds, job->connections, -1) < 0 && errno != EINTR)
			return fail(job, "poll: %s", strerror(errno));
	}
}

static int run_bandwidth(struct run *r)
{
	struct tcp_job *job = r->job;
	uint64_t start;

	if (job->warmup && stream_until(r, job->warmup))
		return -1;
	start = now_ns();
	if (stream_until(r, job->warmup + job->iterations))
		return -1;
	job->elapsed_ns = now_ns() - start;
	if (sends(job))
		job->bytes = job->iterations * job->size * job->connections;
	return stream_until(r, r->total);
}

int tcp_run(struct tcp_job *job)
{
	struct run *r;
	unsigned int c;
	int err = -1, one = 1;

	job->error[0] = 0;
	job->sample_count = job->elapsed_ns = job->bytes = 0;
	job->tx_messages = job->rx_messages = job->tx_bytes = job->rx_bytes = 0;
	if (job->struct_bytes != sizeof(*job))
		return fail(job, "tcp.so and its caller disagree about struct tcp_job: %llu and %zu bytes",
			    (unsigned long long)job->struct_bytes, sizeof(*job));
	if (job->connections < 1 || job->connections > MAX_CONNECTIONS)
		return fail(job, "%u connections: 1 to %d are possible", job->connections,
			    MAX_CONNECTIONS);
	if (!job->size)
		return fail(job, "size 0: a message needs a byte to be checked by");
	if (!job->bandwidth && (job->connections != 1 || job->two_way))
		return fail(job, "latency is measured on one connection, one message at a time");
	r = calloc(1, sizeof(*r));
	if (!r)
		return fail(job, "no memory");
	r->job = job;
	r->total = job->warmup + job->iterations + 1;
	for (c = 0; c < job->connections; c++) {
		r->stream[c].tx = job->buffer + 2 * c * job->size;
		r->stream[c].rx = r->stream[c].tx + job->size;
		if (setsockopt(job->fds[c], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))) {
			fail(job, "TCP_NODELAY: %s", strerror(errno));
			goto out;
		}
	}
	if (watchdog_start(&r->dog, job->idle_ns, job->total_ns, job->control_fd)) {
		fail(job, "the watchdog's timer: %s", strerror(errno));
		goto out;
	}
	err = job->bandwidth ? run_bandwidth(r) : run_latency(r);
	watchdog_stop(&r->dog);
	for (c = 0; c < job->connections; c++) {
		const struct stream *s = &r->stream[c];

		job->tx_messages += s->sent;
		job->rx_messages += s->received;
		job->tx_bytes += s->sent * job->size + s->tx_at;
		job->rx_bytes += s->received * job->size + s->rx_at;
	}
out:
	free(r);
	return err;
}
