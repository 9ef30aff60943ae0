/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What sparse 0.6.4 cannot read in the headers of kernels from 7.0
 * on. Seen by sparse alone; to be removed with a sparse that knows them.
 */

/* C23's operator, which compiler_types.h takes for granted in a checker. */
#define __typeof_unqual__ __typeof__

/*
 * MODULE_INFO() asserts that its string holds no NUL, which is a constant
 * expression only to a compiler that folds strlen().
 */
#define __builtin_strlen(string) (sizeof(string) - 1)
