/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What every probe shares. The loader puts in front of this file the constants that it
 * took from the running kernel (offsets from the module's BTF, addresses from kallsyms),
 * so no kernel header is read: <linux/workqueue.h> alone costs 20 s of compiling on an
 * emulated CPU.
 */

/* What a thread is in the middle of. An interrupt on top of it runs other stages than it
 * does itself, and each idle thread is one of its own, so no two write the same field.
 */
struct thread {
	u64 started[SLOTS];	/* time of entry, by slot; 0: not inside */
	u64 completing;		/* send queue whose completer runs */
};

/* One call of a probed function, as the dispatching programs hand it on. */
struct call {
	u64 arg1;
	u64 arg2;
	s64 ret;
	u64 now;
	/* NULL where the kernel had no memory for it */
	struct thread *thread;
};

/* Storage on the task itself costs a fraction of a hash map's update, lookup and delete. */
BPF_TASK_STORAGE(threads, struct thread);

struct row {
	u64 count[BUCKETS];
};

BPF_PERCPU_ARRAY(rows, struct row, SLOTS);
BPF_PERCPU_ARRAY(lost, u64, PROBES);

static __always_inline struct thread *this_thread(void)
{
	return threads.task_storage_get((void *)bpf_get_current_task_btf(), 0,
					BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/*
 * Log-linear: values below 4 have a bucket each, every power of two above is cut into
 * four. rdmalab.probe.buckets is the same arithmetic in Python.
 */
static __always_inline u32 bucket_of(u64 value)
{
	u32 power = 0, bucket;
	u64 rest = value;

	if (value < 4)
		return value;
	if (rest >> 32) {
		power += 32;
		rest >>= 32;
	}
	if (rest >> 16) {
		power += 16;
		rest >>= 16;
	}
	if (rest >> 8) {
		power += 8;
		rest >>= 8;
	}
	if (rest >> 4) {
		power += 4;
		rest >>= 4;
	}
	if (rest >> 2) {
		power += 2;
		rest >>= 2;
	}
	if (rest >> 1)
		power += 1;
	bucket = (power - 1) * 4 + ((value >> (power - 2)) & 3);
	return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

/* Atomic though the map is per CPU: a program may be preempted by another on its CPU. */
static __always_inline void record(u32 slot, u64 value)
{
	struct row *row = rows.lookup(&slot);
	u32 bucket = bucket_of(value);

	if (row && bucket < BUCKETS)
		__sync_fetch_and_add(&row->count[bucket], 1);
}

static __always_inline void lose(u32 probe, u64 events)
{
	u64 *count = lost.lookup(&probe);

	if (count)
		__sync_fetch_and_add(count, events);
}

static __always_inline u64 read64(u64 address)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
	return value;
}

static __always_inline u32 read32(u64 address)
{
	u32 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
	return value;
}

/*
 * Members behind a pointer that the verifier knows the type of (an argument of a function,
 * or what was loaded from such): a plain load, a tenth of what the helper above costs.
 */
#define LOAD64(address) (*(u64 *)(address))
#define LOAD32(address) (*(u32 *)(address))
