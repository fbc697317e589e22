// Rows of several blocks of lists, with any offsets and ranges.
#include "join_lists/cpu.cpp"

#include "fuzz.h"

namespace {

struct Block {
  std::vector<fuzz::Held<int64_t>> values, offsets;
  std::vector<fuzz::Held<int32_t>> narrow;
  int64_t num_rows;
  std::unique_ptr<recmill::ListBlock> lists;
};

Block make_block(fuzz::Feed& feed, int64_t num_features) {
  Block block;
  block.num_rows = feed.below(10);
  std::vector<recmill::Input> values, offsets;
  for (int64_t k = 0; k < num_features; ++k) {
    const int64_t count = feed.below(40);
    block.values.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) block.values.back()[i] = feed.mostly_up_to(20);
    block.offsets.push_back(fuzz::offsets_of(feed, block.num_rows, count));
    block.narrow.emplace_back(block.num_rows + 1);
    for (int64_t row = 0; row <= block.num_rows; ++row)
      block.narrow.back()[row] = static_cast<int32_t>(block.offsets.back()[row]);
  }
  const bool is_narrow = feed.below(2);
  for (int64_t k = 0; k < num_features; ++k) {
    values.push_back(block.values[k].in());
    offsets.push_back(is_narrow ? block.narrow[k].in() : block.offsets[k].in());
    if (is_narrow)
      for (int64_t row = 0; row <= block.num_rows; ++row) block.offsets[k][row] = block.narrow[k][row];
  }
  const int64_t claimed = feed.below(16) ? block.num_rows : feed.mostly_up_to(12);
  block.lists = std::make_unique<recmill::ListBlock>(values, offsets, claimed);
  return block;
}

void join(fuzz::Feed& feed) {
  const int64_t num_features = feed.below(4), num_blocks = feed.below(4);
  std::vector<Block> blocks;
  std::vector<const recmill::ListBlock*> lists;
  fuzz::Held<int64_t> ranges(2 * num_blocks), counts(num_features), bounds(num_features);
  for (int64_t k = 0; k < num_features; ++k) bounds[k] = feed.mostly_up_to(24);
  int64_t num_rows = 0, num_values = 0;
  bool is_sane = true;
  for (int64_t p = 0; p < num_blocks; ++p) {
    blocks.push_back(make_block(feed, num_features));
    lists.push_back(blocks.back().lists.get());
    fuzz::Held<int64_t> ends(blocks.back().num_rows + 1);
    recmill::OptionalInput bounded;
    if (feed.below(2)) bounded = bounds.in();
    try {
      recmill::scan_lists(*lists.back(), bounded, ends.out());
    } catch (const std::invalid_argument&) {
      is_sane = false;
    }
    const int64_t start = ranges[2 * p] = feed.mostly_up_to(blocks.back().num_rows);
    const int64_t stop = ranges[2 * p + 1] = feed.mostly_up_to(blocks.back().num_rows);
    is_sane &= start >= 0 && start <= stop && stop <= blocks.back().num_rows;
    if (!is_sane) continue;
    num_rows += stop - start;
    num_values += ends[stop] - ends[start];
  }
  is_sane &= num_values >= 0 && num_values < 1000;
  fuzz::Held<int64_t> out(is_sane ? num_values : feed.below(60));
  fuzz::Held<int32_t> lengths(num_features * num_rows);
  recmill::join_lists(lists, ranges.in(), out.out(), lengths.out(), counts.out(), {}, {});
  for (int64_t k = 0, at = 0, row_at = 0; k < num_features; ++k)
    for (int64_t p = 0; p < num_blocks; ++p)
      for (int64_t row = ranges[2 * p]; row < ranges[2 * p + 1]; ++row, ++row_at) {
        const int64_t first = blocks[p].offsets[k][row], last = blocks[p].offsets[k][row + 1];
        fuzz::must(lengths[row_at] == last - first, "a list has another length");
        for (int64_t i = first; i < last; ++i)
          fuzz::must(out[at++] == blocks[p].values[k][i], "a list holds other ids");
      }
}

}  // namespace

FUZZ(join)
