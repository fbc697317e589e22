// Checksums of pages: any chunk of any bytes.
#include "check_pages/cpu.cpp"

#include "fuzz.h"

namespace {

void check(fuzz::Feed& feed) {
  const bool needs_checksums = feed.below(2);
  const int64_t num_chunks = feed.below(3) + 1;
  fuzz::Held<int64_t> chunks(4 * num_chunks);
  for (int64_t i = 0; i < num_chunks; ++i) {
    chunks[4 * i] = feed.mostly_up_to(16);
    chunks[4 * i + 1] = feed.below(2) ? 0 : feed.number<int16_t>();
    chunks[4 * i + 2] = feed.mostly_up_to(200);
    chunks[4 * i + 3] = feed.number<int64_t>();
  }
  fuzz::Held<uint8_t> data(feed.rest(), feed.rest() + feed.left());
  if (chunks[1] == 0) chunks[1] = std::max<int64_t>(0, data.size() - chunks[0]);
  const int64_t found = recmill::check_pages(data.in(), chunks.in(), needs_checksums);
  fuzz::must(found >= -1 && found < num_chunks, "names a chunk that does not exist");
  recmill::checksum(data.in());
}

}  // namespace

FUZZ(check)
