// Checks the pages of Parquet column chunks before anything decodes them. One call per row group, without the GIL.
#include "arrays.h"
#include "check_pages/crc32.h"
#include "decode_pages/pages.h"

namespace recmill {
namespace {

// One row of the matrix that kernels/check_pages/__init__.py passes, int64 each.
struct PageChunk {
  int64_t begin, size;  // bytes in `data`
  int64_t num_values;   // of all data pages together
  int64_t encodings;    // bit e is set if the footer lists encoding e
};

// A checksum covers the body of a page. What the header says about it is compared with the footer.
bool is_intact(const PageChunk& chunk, const uint8_t* data) {
  Cursor in{data + chunk.begin, data + chunk.begin + chunk.size};
  int64_t num_values = 0;
  while (in.left() > 0) {
    const PageHeader page = read_header(in);
    const Cursor body = in.take(page.stored_size);
    if (!page.has_crc || page.crc != crc32(body.at, body.left())) return false;
    if (page.encoding < 0 || page.encoding > 62 || !(chunk.encodings >> page.encoding & 1)) return false;
    if (page.definition_encoding != kRuns || page.repetition_encoding != kRuns) return false;
    if (page.type == kDataPage) num_values += page.num_values;
  }
  return num_values == chunk.num_values;
}

// Only checksums that are there.
bool is_plausible(const PageChunk& chunk, const uint8_t* data) {
  Cursor in{data + chunk.begin, data + chunk.begin + chunk.size};
  while (in.left() > 0) {
    const PageHeader page = read_header(in);
    const Cursor body = in.take(page.stored_size);
    if (page.has_crc && page.crc != crc32(body.at, body.left())) return false;
  }
  return true;
}

// The first damaged chunk, or -1. Unless all pages must have checksums, what is not understood is left to Arrow.
int64_t check_pages(const Input& data, const Input& chunks, bool needs_checksums) {
  const int64_t num_fields = sizeof(PageChunk) / sizeof(int64_t), num_chunks = chunks.num_items() / num_fields;
  const auto* described =
      reinterpret_cast<const PageChunk*>(chunks.as<const int64_t>("chunks", num_chunks * num_fields));
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.bytes("data"));
  const int64_t num_bytes = static_cast<int64_t>(data.nbytes());
  for (int64_t i = 0; i < num_chunks; ++i) {
    const PageChunk& chunk = described[i];
    try {
      expect(chunk.begin >= 0 && chunk.begin <= num_bytes && chunk.size >= 0 && chunk.size <= num_bytes - chunk.begin);
      if (!(needs_checksums ? is_intact(chunk, bytes) : is_plausible(chunk, bytes))) return i;
    } catch (const NotForUs&) {
      if (needs_checksums) return i;
    }
  }
  return -1;
}

int64_t checksum(const Input& data) {
  return crc32(reinterpret_cast<const uint8_t*>(data.bytes("data")), static_cast<int64_t>(data.nbytes()));
}

}  // namespace

void bind_check_pages(nb::module_& m) {
  add_function(m, "check_pages", &check_pages);
  add_function(m, "crc32", &checksum);
}

}  // namespace recmill
