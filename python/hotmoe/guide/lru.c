/* An eviction policy in plain C: least recently used.
 *
 *     cc -std=c99 -O2 -shared -fPIC -I "$(python -c 'import hotmoe; print(hotmoe.include_path())')" lru.c -o lru.so
 *     hotmoe run model.gguf -p "Once upon a time" -mec 32 --moe-expert-cache-policy lib:./lru.so
 *
 * hotmoe/policy.h says when each function is called. One object serves one layer; the cache checks every answer. */

#include <hotmoe/policy.h>

#include <stdlib.h>
#include <string.h>

struct lru {
    int32_t    n_expert;
    uint64_t   now;
    uint64_t * last_use; /* per expert, 0 = never */
};

static void on_access(void * context, const struct hotmoe_event * event) {
    struct lru * lru = context;
    for (int32_t i = 0; i < event->n_experts; i++) {
        lru->last_use[event->experts[i]] = ++lru->now;
    }
}

static int32_t select_evict(void * context, const struct hotmoe_event * event, int32_t n,
                            const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
    struct lru * lru = context;
    (void) event;
    for (int32_t v = 0; v < n; v++) {
        int32_t oldest = -1;
        for (int32_t i = 0; i < n_candidates; i++) {
            const int32_t id    = candidates[i];
            int           taken = 0;
            for (int32_t k = 0; k < v; k++) {
                taken = taken || victims[k] == id;
            }
            if (!taken && (oldest < 0 || lru->last_use[id] < lru->last_use[oldest])) {
                oldest = id;
            }
        }
        victims[v] = oldest;
    }
    return n;
}

static void reset(void * context) {
    struct lru * lru = context;
    lru->now         = 0;
    memset(lru->last_use, 0, (size_t) lru->n_expert * sizeof(*lru->last_use));
}

static void destroy(void * context) {
    struct lru * lru = context;
    free(lru->last_use);
    free(lru);
}

HOTMOE_API int32_t hotmoe_policy_entry(const struct hotmoe_policy_config * config, struct hotmoe_policy * out);

int32_t hotmoe_policy_entry(const struct hotmoe_policy_config * config, struct hotmoe_policy * out) {
    struct lru * lru = calloc(1, sizeof(*lru));
    if (!lru) {
        return HOTMOE_ERR_MEMORY;
    }
    lru->n_expert = config->n_expert;
    lru->last_use = calloc((size_t) config->n_expert, sizeof(*lru->last_use));
    if (!lru->last_use) {
        free(lru);
        return HOTMOE_ERR_MEMORY;
    }

    memset(out, 0, sizeof(*out));
    out->struct_size  = sizeof(*out);
    out->abi_version  = HOTMOE_POLICY_ABI_VERSION;
    out->context      = lru;
    out->on_access    = on_access;
    out->select_evict = select_evict;
    out->reset        = reset;
    out->free         = destroy;
    return HOTMOE_OK;
}
