/* OpenMP's parallel regions, as GCC calls them, on plain threads; and memcpy and memset, byte by byte.
 *
 * ThreadSanitizer knows the order that threads and barriers of the C library establish. Of GCC's libgomp, which is not
 * compiled for it, it knows nothing: whatever one thread writes and another reads after a barrier would count as a race.
 * With this file in place of libgomp it sees all the order that there is, so that what it reports is a race. Nor does GCC
 * tell it of what memcpy and memset touch.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct {
    void (*work)(void *);
    void *data;
    pthread_barrier_t barrier;
    unsigned count;
} Team;

typedef struct {
    Team *team;
    unsigned number;
} Member;

static _Thread_local Member self;

int omp_get_thread_num(void) { return (int)self.number; }

int omp_get_num_threads(void) { return self.team ? (int)self.team->count : 1; }

void GOMP_barrier(void) { pthread_barrier_wait(&self.team->barrier); }

static void *take_part(void *member) {
    self = *(Member *)member;
    self.team->work(self.team->data);
    return NULL;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned count, unsigned flags) {
    Team team = {.work = work, .data = data, .count = count};
    Member members[count];
    pthread_t threads[count];
    (void)flags;
    pthread_barrier_init(&team.barrier, NULL, count);
    for (unsigned i = 0; i < count; i++) {
        members[i] = (Member){&team, i};
        if (pthread_create(&threads[i], NULL, take_part, &members[i]))
            abort();
    }
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&team.barrier);
}

void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        ((char *)to)[i] = ((const char *)from)[i];
    return to;
}

void *memset(void *to, int value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        ((char *)to)[i] = (char)value;
    return to;
}
