// SPDX-License-Identifier: GPL-2.0-only
/*
 * A QEMU TCG plugin that counts guest instructions.
 *
 *	-plugin instructions.so,socket=PATH
 *
 * Kernel instructions (upper half of the address space) are counted by the
 * address where their translated block starts; those of user space in one
 * counter for all processes: the same address is another program's code in each
 * of them, and a block does not tell whose it is. A block costs one inline
 * addition a run, without a call.
 *
 * A mark is a copy of all counters. A client takes one through the socket; the
 * guest takes one by executing the marker instruction, which is a no-op to every
 * processor, so that a program can bracket just what it wants counted:
 *
 *	0f 1f 84 00 <id> 'k' 'r' 'm'	nopl 0x6d726b<id>(%rax,%rax,1)
 *
 * What is counted is blocks entered times the instructions in them. A block that
 * a fault or an interrupt leaves early counts whole, and it counts again when it
 * is entered again to go on. A string instruction with a rep prefix counts once
 * for every element under -icount, where QEMU leaves the block after each, and
 * once whatever its length without.
 *
 * Socket: a stream; lines of words from the client, each answered by lines of
 * which the last begins with "ok" or "error".
 *	hello		ok instructions 2 vcpus N blocks N
 *	mark		ok N			takes a mark, numbered from 0
 *	marks		mark N host|guest:ID ns N kernel N user N ...	ok COUNT
 *	delta A B	user N, kernel PC N SIZE ...			ok COUNT
 *	reset		ok			forgets the marks
 * ns is the host's CLOCK_MONOTONIC. PC is in hex, N is not 0, SIZE is the number of
 * instructions in the block, so that N / SIZE is how often it was entered; 0 where the
 * block was translated in several sizes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "qemu_plugin.h"

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

/* Counters in one scoreboard: a scoreboard each would be a list walk in QEMU. */
#define BOARD 1024
/* A mark takes 8 bytes a block, and a booted guest has some 100,000. */
#define MARKS 256
/* A client that says nothing, or does not read, for so long is dropped. */
#define CLIENT_SECONDS 20

#define MARKER_SIZE 8
#define MARKER_ID 4	/* the byte that is free */

static const unsigned char marker[MARKER_SIZE] = {
	0x0f, 0x1f, 0x84, 0x00, 0, 'k', 'r', 'm',
};

struct block {
	uint64_t pc;
	uint32_t size;		/* 0: it had several */
	qemu_plugin_u64 count;
};

struct mark {
	int guest_id;		/* -1: the client's */
	size_t blocks;		/* how many there were */
	uint64_t ns;
	uint64_t user;
	uint64_t kernel;
	uint64_t *counts;	/* by index into blocks */
};

/* Guards the counters and the marks: vCPU threads translate, the server reads. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct block *blocks;
static size_t n_blocks, room;
/* Open addressing, a power of two, at most half full; index + 1, 0 is free. */
static uint32_t *slots;
static size_t n_slots;

static struct qemu_plugin_scoreboard *board;
static size_t board_used = BOARD;

static qemu_plugin_u64 user_count;

static struct mark marks[MARKS];
static size_t n_marks;

/* Guards the server's coming and going. */
static pthread_mutex_t server_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sockaddr_un address = { .sun_family = AF_UNIX };
static int listener = -1;
static int client = -1;		/* the connection being served */
static bool ending;
static bool serving;
static pthread_t server;

static void *must(void *memory)
{
	if (!memory) {
		fprintf(stderr, "instructions plugin: out of memory\n");
		abort();
	}
	return memory;
}

static size_t slot_of(uint64_t pc)
{
	size_t slot = (pc * 0x9e3779b97f4a7c15u) >> 32 & (n_slots - 1);

	while (slots[slot] && blocks[slots[slot] - 1].pc != pc)
		slot = (slot + 1) & (n_slots - 1);
	return slot;
}

static void grow(void)
{
	room = room ? room * 2 : 1 << 15;
	n_slots = room * 2;
	blocks = must(realloc(blocks, room * sizeof(*blocks)));
	free(slots);
	slots = must(calloc(n_slots, sizeof(*slots)));
	for (size_t i = 0; i < n_blocks; i++)
		slots[slot_of(blocks[i].pc)] = i + 1;
}

static qemu_plugin_u64 count_of(uint64_t pc, uint32_t size)
{
	struct qemu_plugin_scoreboard *fresh;
	qemu_plugin_u64 count;
	size_t slot;

	pthread_mutex_lock(&lock);
	if (board_used == BOARD) {
		/*
		 * QEMU takes a lock of its own in here, which it also holds around
		 * some callbacks: ours must not be held. Two vCPUs may both come
		 * here; the second's board replaces the first's, which stays in use
		 * for what it gave out.
		 */
		pthread_mutex_unlock(&lock);
		fresh = qemu_plugin_scoreboard_new(BOARD * sizeof(uint64_t));
		pthread_mutex_lock(&lock);
		board = fresh;
		board_used = 0;
	}
	if (n_blocks == room)
		grow();
	slot = slot_of(pc);
	if (!slots[slot]) {
		blocks[n_blocks].pc = pc;
		blocks[n_blocks].size = size;
		blocks[n_blocks].count.score = board;
		blocks[n_blocks].count.offset = board_used++ * sizeof(uint64_t);
		slots[slot] = ++n_blocks;
	} else if (blocks[slots[slot] - 1].size != size) {
		blocks[slots[slot] - 1].size = 0;
	}
	count = blocks[slots[slot] - 1].count;
	pthread_mutex_unlock(&lock);
	return count;
}

/* Returns the mark's number, or -1 when there is no room. */
static int take_mark(int guest_id)
{
	struct timespec now;
	struct mark *mark;
	int number = -1;

	pthread_mutex_lock(&lock);
	if (n_marks < MARKS) {
		number = n_marks++;
		mark = &marks[number];
		clock_gettime(CLOCK_MONOTONIC, &now);
		mark->guest_id = guest_id;
		mark->ns = now.tv_sec * 1000000000ull + now.tv_nsec;
		mark->blocks = n_blocks;
		mark->user = qemu_plugin_u64_sum(user_count);
		mark->kernel = 0;
		mark->counts = must(malloc((n_blocks + 1) * sizeof(uint64_t)));
		for (size_t i = 0; i < n_blocks; i++) {
			mark->counts[i] = qemu_plugin_u64_sum(blocks[i].count);
			mark->kernel += mark->counts[i];
		}
	}
	pthread_mutex_unlock(&lock);
	return number;
}

/* In the vCPU's thread, at the marker: nothing of this guest runs meanwhile. */
static void marker_executed(unsigned int vcpu, void *id)
{
	(void)vcpu;
	if (take_mark((int)(intptr_t)id) < 0)
		fprintf(stderr, "instructions plugin: guest mark %d lost, %d are held\n",
			(int)(intptr_t)id, MARKS);
}

static void look_for_marker(struct qemu_plugin_tb *tb, size_t n)
{
	unsigned char code[MARKER_SIZE], expect[MARKER_SIZE];

	memcpy(expect, marker, MARKER_SIZE);
	for (size_t i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		if (qemu_plugin_insn_size(insn) != MARKER_SIZE ||
		    qemu_plugin_insn_data(insn, code, MARKER_SIZE) != MARKER_SIZE)
			continue;
		expect[MARKER_ID] = code[MARKER_ID];
		if (!memcmp(code, expect, MARKER_SIZE))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, marker_executed,
							       QEMU_PLUGIN_CB_NO_REGS,
							       (void *)(intptr_t)code[MARKER_ID]);
	}
}

static void translated(struct qemu_plugin_tb *tb, void *userdata)
{
	uint64_t pc = qemu_plugin_tb_vaddr(tb);
	size_t n = qemu_plugin_tb_n_insns(tb);
	bool kernel = pc >> 63;

	(void)userdata;
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64,
							  kernel ? count_of(pc, n) : user_count, n);
	look_for_marker(tb, n);
}

static void answer_marks(FILE *out)
{
	for (size_t i = 0; i < n_marks; i++) {
		fprintf(out, "mark %zu ", i);
		if (marks[i].guest_id < 0)
			fputs("host", out);
		else
			fprintf(out, "guest:%d", marks[i].guest_id);
		fprintf(out, " ns %" PRIu64 " kernel %" PRIu64 " user %" PRIu64 "\n",
			marks[i].ns, marks[i].kernel, marks[i].user);
	}
	fprintf(out, "ok %zu\n", n_marks);
}

static void answer_delta(FILE *out, size_t a, size_t b)
{
	const struct mark *from = &marks[a], *to = &marks[b];
	size_t lines = 0;

	fprintf(out, "user %" PRIu64 "\n", to->user - from->user);
	for (size_t i = 0; i < to->blocks; i++) {
		uint64_t before = i < from->blocks ? from->counts[i] : 0;

		if (to->counts[i] == before)
			continue;
		fprintf(out, "kernel %" PRIx64 " %" PRIu64 " %" PRIu32 "\n", blocks[i].pc,
			to->counts[i] - before, blocks[i].size);
		lines++;
	}
	fprintf(out, "ok %zu\n", lines);
}

static void reset_marks(void)
{
	while (n_marks)
		free(marks[--n_marks].counts);
}

static void answer(FILE *out, const char *line)
{
	unsigned int a, b;
	int number, end = 0;

	if (!strcmp(line, "mark")) {
		number = take_mark(-1);
		if (number < 0)
			fprintf(out, "error %d marks are held, reset first\n", MARKS);
		else
			fprintf(out, "ok %d\n", number);
		return;
	}
	pthread_mutex_lock(&lock);
	if (!strcmp(line, "hello")) {
		fprintf(out, "ok instructions 2 vcpus %d blocks %zu\n",
			qemu_plugin_num_vcpus(), n_blocks);
	} else if (!strcmp(line, "marks")) {
		answer_marks(out);
	} else if (!strcmp(line, "reset")) {
		reset_marks();
		fputs("ok\n", out);
	} else if (sscanf(line, "delta %u %u%n", &a, &b, &end) == 2 && !line[end]) {
		if (a < b && b < n_marks)
			answer_delta(out, a, b);
		else
			fprintf(out, "error no marks %u and %u in this order, there are %zu\n",
				a, b, n_marks);
	} else {
		fputs("error hello, mark, marks, delta A B or reset\n", out);
	}
	pthread_mutex_unlock(&lock);
}

static bool send_all(int fd, const char *text, size_t size)
{
	while (size) {
		ssize_t sent = send(fd, text, size, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0)
			return false;
		text += sent;
		size -= sent;
	}
	return true;
}

/* One client until it closes, errs, or is silent for too long. */
static void serve_client(int fd)
{
	struct timeval limit = { .tv_sec = CLIENT_SECONDS };
	char line[128];
	size_t have = 0;
	bool good = true;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	while (good && have < sizeof(line)) {
		ssize_t got = recv(fd, line + have, sizeof(line) - have, 0);
		char *end;

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		have += got;
		while (good && (end = memchr(line, '\n', have))) {
			char *text = NULL;
			size_t size = 0;
			FILE *out = must(open_memstream(&text, &size));

			*end++ = '\0';
			answer(out, line);
			fclose(out);
			good = send_all(fd, text, size);
			free(text);
			have -= end - line;
			memmove(line, end, have);
		}
	}
}

static void *serve(void *unused)
{
	(void)unused;
	for (;;) {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		pthread_mutex_lock(&server_lock);
		client = fd;
		if (fd < 0 || ending) {
			pthread_mutex_unlock(&server_lock);
			break;
		}
		pthread_mutex_unlock(&server_lock);
		serve_client(fd);
		pthread_mutex_lock(&server_lock);
		client = -1;
		pthread_mutex_unlock(&server_lock);
		close(fd);
	}
	return NULL;
}

/*
 * The server starts with the first vCPU and not at install: a QEMU that is told
 * to daemonize forks in between, and a fork leaves threads behind.
 */
static void vcpu_started(unsigned int vcpu, void *userdata)
{
	(void)vcpu;
	(void)userdata;
	pthread_mutex_lock(&server_lock);
	if (!serving && !ending)
		serving = !pthread_create(&server, NULL, serve, NULL);
	pthread_mutex_unlock(&server_lock);
}

static void exiting(void *userdata)
{
	bool join;

	(void)userdata;
	pthread_mutex_lock(&server_lock);
	ending = true;
	join = serving;
	if (client >= 0)
		shutdown(client, SHUT_RDWR);
	pthread_mutex_unlock(&server_lock);
	shutdown(listener, SHUT_RDWR);
	if (join)
		pthread_join(server, NULL);
	unlink(address.sun_path);
}

static int listen_at(const char *path)
{
	struct stat found;

	if (strlen(path) >= sizeof(address.sun_path)) {
		fprintf(stderr, "instructions plugin: %s: longer than a socket's name may be (%zu)\n",
			path, sizeof(address.sun_path) - 1);
		return -1;
	}
	strcpy(address.sun_path, path);
	/* One that a killed QEMU left; anything else of that name stays. */
	if (!lstat(path, &found) && S_ISSOCK(found.st_mode))
		unlink(path);
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) ||
	    listen(listener, 4)) {
		fprintf(stderr, "instructions plugin: %s: %s\n", path, strerror(errno));
		return -1;
	}
	return 0;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info,
					   int argc, char **argv)
{
	const char *path = NULL;

	for (int i = 0; i < argc; i++) {
		if (strncmp(argv[i], "socket=", 7)) {
			fprintf(stderr, "instructions plugin: unknown argument %s\n", argv[i]);
			return -1;
		}
		path = argv[i] + 7;
	}
	if (!path || !info->system_emulation || strcmp(info->target_name, "x86_64")) {
		fprintf(stderr, "instructions plugin: needs socket=PATH and an x86_64 machine\n");
		return -1;
	}
	if (listen_at(path))
		return -1;
	user_count.score = qemu_plugin_scoreboard_new(sizeof(uint64_t));
	qemu_plugin_register_vcpu_init_cb(id, vcpu_started, NULL);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated, NULL);
	qemu_plugin_register_atexit_cb(id, exiting, NULL);
	return 0;
}
