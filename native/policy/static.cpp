// Static: a list of experts to keep, from a profile of earlier use.
//
// Experts that are not on the list go first, least recently used first; then those on the list, from its end. The list has the
// hottest expert first, so that the pool keeps as much of its beginning as it has room for. Nothing is loaded ahead: an expert
// of the list comes when it is used for the first time, and stays. With an empty list this is LRU.
//
// pins=3 5 7             these, in every layer
// pins=0:3 5 7;2:1 4     these in layer 0, those in layer 2, none in others; the same for both banks of a layer
// In a pool that all layers share, ids count through the layers, and the layer is -1.
//
// Cost per event: one store per expert.

#include "policies.h"
#include "policy_util.h"

#include <sstream>
#include <string>
#include <utility>
#include <vector>

struct policy_static : policy_base {
    std::vector<uint64_t> first;    // per expert: 0 if it is not on the list, else the larger the hotter
    std::vector<uint64_t> last_use; // per expert
    uint64_t              tick = 0;

    policy_static(int32_t n_expert, const std::vector<int32_t> & pins) : first(n_expert, 0), last_use(n_expert, 0) {
        for (size_t i = 0; i < pins.size(); i++) {
            first[pins[i]] = pins.size() - i;
        }
    }

    void on_access(const hotmoe_event & event) {
        for (int32_t i = 0; i < event.n_experts; i++) {
            last_use[event.experts[i]] = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return std::make_pair(first[id], first[id] ? 0 : last_use[id]); });
    }

    void reset() {
        std::fill(last_use.begin(), last_use.end(), 0);
        tick = 0;
    }
};

// The list of the layer. What is wrong with it is told to the options, also if it is another layer's.
static std::vector<int32_t> parse_pins(const hotmoe_policy_config & config, const std::string & text, policy_options & options) {
    std::vector<int32_t> pins;
    std::vector<bool>    seen(config.n_expert, false);
    std::istringstream   lists(text);
    for (std::string list; std::getline(lists, list, ';');) {
        std::istringstream in(list);
        const size_t       colon = list.find(':');
        long               number;
        bool               here = colon == std::string::npos; // the list is for this layer
        if (!here) {
            char mark;
            if (!(in >> number >> mark) || mark != ':') {
                options.fail("pins=" + text + ": a layer must stand before the colon");
                return {};
            }
            here = number == config.layer;
        } else if (list.size() < text.size()) {
            options.fail("pins=" + text + ": each of several lists needs a layer and a colon in front");
            return {};
        }
        while (in >> number) {
            if (number < 0 || (here && number >= config.n_expert)) {
                options.fail("pins=" + text + ": " + std::to_string(number) + " is not an expert in [0, " + std::to_string(config.n_expert) + ")");
                return {};
            }
            if (here && seen[number]) {
                options.fail("pins=" + text + ": " + std::to_string(number) + " is given twice");
                return {};
            }
            if (here) {
                seen[number] = true;
                pins.push_back((int32_t) number);
            }
        }
        if (!in.eof()) {
            options.fail("pins=" + text + ": expert ids are whole numbers with spaces between them");
            return {};
        }
    }
    return pins;
}

hotmoe_policy policy_static_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_static(config.n_expert, parse_pins(config, options.text("pins"), options)));
}
