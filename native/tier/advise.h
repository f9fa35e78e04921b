#pragma once

// The port to the system's page cache: advice about memory that is mapped from files.
//
// Advice is given only about pages that the system can read again from their file: those of a mapping of a regular file that is
// shared, or private, read-only and without pages of its own (copied when somebody wrote to them). All else is refused. Linux
// alone has what this needs; elsewhere everything is refused, and supported() says so.

#include "hotmoe/tier.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct page_range {
    uintptr_t begin = 0;
    uintptr_t end   = 0; // past the last byte; begin if there is no page

    size_t size() const { return end - begin; }
};

// The pages that advice about [address, address + size) is for: those that it touches (WILLNEED), those that it fills
// (DONTNEED). page is a power of 2.
page_range round_to_pages(uintptr_t address, size_t size, int32_t advice, size_t page);

class page_advisor {
  public:
    enum result {
        ADVISED, // the system was asked, or there was no whole page to ask about
        FAILED,  // the system reported an error
        REFUSED, // not in a mapping that advice may be given about
    };

    page_advisor(); // looks up what is mapped now: memory that is mapped later is refused
    ~page_advisor();

    page_advisor(const page_advisor &)             = delete;
    page_advisor & operator=(const page_advisor &) = delete;

    static bool supported();

    // false: advice about this would be refused
    bool may_advise(const void * data, size_t size) { return mapping_of(round_to_pages((uintptr_t) data, size, HOTMOE_TIER_WILLNEED, page)) != nullptr; }

    // *bytes: of the pages that it was about
    result advise(const void * data, size_t size, int32_t advice, uint64_t * bytes);

    // Bytes of the pages inside of the range, and of those that are in the page cache. false: the system does not tell.
    bool resident(const void * data, size_t size, uint64_t * bytes, uint64_t * in_cache) const;

  private:
    struct mapping {
        page_range  range;
        uint64_t    offset = 0; // in the file, of the first byte
        uint64_t    inode  = 0;
        std::string path;
        bool        is_private = false;
        int         file       = NOT_OPENED;
    };

    enum { NOT_OPENED = -1,
           NO_FILE    = -2 }; // none that can be opened and is a regular one

    void      read_mappings();
    mapping * mapping_of(const page_range & range);

    size_t               page;
    std::vector<mapping> mappings; // those that may be advised about, by address
};
