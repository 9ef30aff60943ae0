/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the verbs loop and the TCP loop share: the clock, the watchdog, and the
 * message pattern by which both prove that the bytes arrived.
 */
#ifndef RDMALAB_COMMON_H
#define RDMALAB_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ERROR_BYTES 256
#define FULL_CHECKS 2	/* warm-up messages whose every byte is checked */

static inline uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_RAW, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/*
 * Message number n (from 1) ends in n as a big-endian number, so that the very
 * last byte changes with every message; the bytes before it are words that
 * depend on n, on their place and on a seed, so that a packet that is missing,
 * stale or misplaced shows.
 */
#define STAMP_BYTES 8

static inline void put_stamp(uint8_t *message, uint64_t size, uint64_t n)
{
	uint64_t width = size < STAMP_BYTES ? size : STAMP_BYTES;
	uint64_t be = __builtin_bswap64(n);

	memcpy(message + size - width, (uint8_t *)&be + STAMP_BYTES - width, width);
}

static inline int has_stamp(const uint8_t *message, uint64_t size, uint64_t n)
{
	uint64_t width = size < STAMP_BYTES ? size : STAMP_BYTES;
	uint64_t be = __builtin_bswap64(n);
	const volatile uint8_t *last = message + size - 1;

	if (*last != (uint8_t)n)	/* cheap, and not optimised away while polling */
		return 0;
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return !memcmp(message + size - width, (uint8_t *)&be + STAMP_BYTES - width, width);
}

/* The stamp found, for the message of an error. */
static inline uint64_t get_stamp(const uint8_t *message, uint64_t size)
{
	uint64_t width = size < STAMP_BYTES ? size : STAMP_BYTES;
	uint64_t be = 0;

	memcpy((uint8_t *)&be + STAMP_BYTES - width, message + size - width, width);
	return __builtin_bswap64(be);
}

static inline uint64_t pattern_word(uint64_t n, uint64_t word, uint64_t seed)
{
	return (n * 0x9e3779b97f4a7c15u) ^ (word * 0xc2b2ae3d27d4eb4fu + seed);
}

static inline void fill_message(uint8_t *message, uint64_t size, uint64_t n, uint64_t seed)
{
	uint64_t i, left;

	for (i = 0; i + 8 <= size; i += 8) {
		uint64_t w = pattern_word(n, i, seed);

		memcpy(message + i, &w, 8);
	}
	left = size - i;
	if (left) {
		uint64_t w = pattern_word(n, i, seed);

		memcpy(message + i, &w, left);
	}
	put_stamp(message, size, n);
}

/* The offset of the first byte that is not message n's, or -1. */
static inline int64_t check_message(const uint8_t *message, uint64_t size, uint64_t n,
				    uint64_t seed)
{
	uint64_t body = size < STAMP_BYTES ? 0 : size - STAMP_BYTES;
	uint64_t i, j;

	for (i = 0; i < body; i += 8) {
		uint64_t w = pattern_word(n, i, seed);
		uint64_t bytes = body - i < 8 ? body - i : 8;

		if (!memcmp(message + i, &w, bytes))
			continue;
		for (j = 0; j < bytes; j++)
			if (message[i + j] != ((uint8_t *)&w)[j])
				return (int64_t)(i + j);
	}
	return has_stamp(message, size, n) ? -1 : (int64_t)(size - 1);
}

/*
 * The watchdog. A blocking read() costs one system call; a poll() with a
 * timeout before it would cost two, and the loop is compared with perftest's.
 * So the deadline is a timer that interrupts the loop's own thread: it fires a
 * few times per idle deadline, looks whether the loop has moved, and sets
 * `expired` when it has not. It keeps firing, so a signal that lands between
 * the test of `expired` and the read() is followed by another one. A tick also
 * looks whether the peer has closed the control connection, so that an error
 * there ends this side within a tick.
 */
enum { EXPIRED_IDLE = 1, EXPIRED_TOTAL, EXPIRED_PEER };

struct watchdog {
	volatile sig_atomic_t expired;
	volatile uint64_t progress;
	uint64_t seen, until;
	unsigned int idle_ticks;
	timer_t timer;
	struct sigaction old;
	int signal, control_fd;
};

#define WATCHDOG_TICKS 8	/* per idle deadline */

static struct watchdog *watchdog_armed;	/* one loop at a time: Python calls us with one thread */

static inline void watchdog_tick(int sig)
{
	struct watchdog *w = watchdog_armed;
	int saved = errno;

	(void)sig;
	if (w) {
		if (w->seen != w->progress) {
			w->seen = w->progress;
			w->idle_ticks = 0;
		} else if (++w->idle_ticks >= WATCHDOG_TICKS) {
			w->expired = EXPIRED_IDLE;
		}
		if (now_ns() > w->until)
			w->expired = EXPIRED_TOTAL;
		if (w->control_fd >= 0) {
			struct pollfd control = { .fd = w->control_fd, .events = POLLRDHUP };

			if (poll(&control, 1, 0) > 0)
				w->expired = EXPIRED_PEER;
		}
	}
	errno = saved;
}

static inline int watchdog_start(struct watchdog *w, uint64_t idle_ns, uint64_t total_ns,
				 int control_fd)
{
	struct sigaction action = { .sa_handler = watchdog_tick };	/* no SA_RESTART */
	struct sigevent event;
	struct itimerspec every;
	uint64_t tick = idle_ns / WATCHDOG_TICKS;

	memset(w, 0, sizeof(*w));
	w->until = now_ns() + total_ns;
	w->signal = SIGRTMIN + 5;
	w->control_fd = control_fd;
	if (tick < 1000000)
		tick = 1000000;
	if (sigaction(w->signal, &action, &w->old))
		return -1;
	memset(&event, 0, sizeof(event));
	event.sigev_notify = SIGEV_THREAD_ID;
	event.sigev_signo = w->signal;
	event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
	watchdog_armed = w;
	if (timer_create(CLOCK_MONOTONIC, &event, &w->timer))
		goto err_action;
	every.it_interval.tv_sec = (time_t)(tick / 1000000000u);
	every.it_interval.tv_nsec = (long)(tick % 1000000000u);
	every.it_value = every.it_interval;
	if (timer_settime(w->timer, 0, &every, NULL))
		goto err_timer;
	return 0;

err_timer:
	timer_delete(w->timer);
err_action:
	watchdog_armed = NULL;
	sigaction(w->signal, &w->old, NULL);
	return -1;
}

static inline void watchdog_stop(struct watchdog *w)
{
	timer_delete(w->timer);
	watchdog_armed = NULL;
	/* A tick may be pending still: ignoring the signal throws it away. */
	signal(w->signal, SIG_IGN);
	sigaction(w->signal, &w->old, NULL);
}

/* "no message within 20.0 s", or the other two reasons. */
static inline void expired_text(const struct watchdog *w, char *text, size_t size,
				const char *waiting_for, uint64_t idle_ns, uint64_t total_ns)
{
	if (w->expired == EXPIRED_PEER)
		snprintf(text, size, "the peer ended while this side waited for a %s", waiting_for);
	else if (w->expired == EXPIRED_TOTAL)
		snprintf(text, size, "the run's deadline of %.1f s passed while waiting for a %s",
			 (double)total_ns / 1e9, waiting_for);
	else
		snprintf(text, size, "no %s within %.1f s", waiting_for, (double)idle_ns / 1e9);
}

#endif
