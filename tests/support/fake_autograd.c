/* Functions of PyTorch's that the compiled probe calls, with nodes made by the test: each thread runs one or none. */

#include <stdint.h>

/* Of what the function that tells of the node returns: 1 is an intrusive_ptr, 2 a shared_ptr, others are unknown. */
static int words = 1;
static __thread uint64_t id, upcoming, node, block;

void fake_words(int count) { words = count; }
void fake_thread(uint64_t number, uint64_t next) { id = number, upcoming = next; }
void fake_run(uint64_t address, uint64_t count_block) { node = address, block = count_block; }

uint64_t *fake_current_node(uint64_t *pointer) {
    uint64_t holder = words == 1 ? node : block;
    for (int at = 0; at < words; at++) pointer[at] = 0;
    if (words > 0) pointer[0] = node;
    if (words > 1) pointer[1] = block;
    if (holder) __atomic_fetch_add((uint32_t *)(uintptr_t)(holder + 8), 1, __ATOMIC_SEQ_CST);
    return pointer;
}

uint64_t fake_thread_id(void) { return id; }
uint64_t fake_upcoming(void) { return upcoming; }
