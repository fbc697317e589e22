// Pages as a damaged or hostile file has them: the column's description, then the bytes of its chunk.
#include "decode_pages/cpu.cpp"

#include "fuzz.h"

namespace {

void decode(fuzz::Feed& feed) {
  static constexpr int64_t kStored[] = {8, 4, 4, 4, 0}, kItems[] = {8, 4, 2, 1, 0};
  const int64_t kind = feed.below(5);
  const uint8_t flags = feed.number<uint8_t>();
  recmill::Column column{};
  column.is_list = flags & 1;
  column.is_compressed = flags >> 1 & 1;
  column.max_definition = flags >> 2 & 3;
  column.empty_definition = flags >> 4 & 3;
  column.stored_bytes = kStored[kind];
  column.item_bytes = kItems[kind];
  column.num_levels = feed.number<uint16_t>() % 1024;
  column.num_rows = column.is_list ? feed.number<uint16_t>() % 1024 : column.num_levels;
  const int64_t num_bits = 8 * column.item_bytes + (column.item_bytes == 0);
  column.offsets_at = ((column.num_levels * num_bits + 7) / 8 + 7) / 8 * 8;
  const int64_t room = column.offsets_at + (column.is_list ? 4 * (column.num_rows + 1) : 0);
  if (flags >> 6 == 1) column.offsets_at = feed.mostly_up_to(room);
  if (flags >> 6 == 2) column.values_at = feed.mostly_up_to(room);
  if (flags >> 6 == 3) column.piece = feed.mostly_up_to(1);
  fuzz::Held<uint8_t> data(feed.rest(), feed.rest() + feed.left()), piece(room);
  column.size = data.size();
  fuzz::Held<int64_t> columns(sizeof column / 8), counts(1);
  std::memcpy(columns.get(), &column, sizeof column);
  recmill::decode_pages(data.in(), columns.in(), {piece.out()}, counts.out());
  fuzz::must(counts[0] >= -1 && counts[0] <= column.num_levels, "a column has more values than levels");
  if (counts[0] < 0 || !column.is_list) return;
  const auto* offsets = reinterpret_cast<const int32_t*>(piece.get() + column.offsets_at);
  for (int64_t row = 0; row < column.num_rows; ++row)
    fuzz::must(offsets[row] >= 0 && offsets[row] <= offsets[row + 1], "offsets do not ascend");
  fuzz::must(offsets[column.num_rows] == counts[0], "the last offset is not the number of values");
}

}  // namespace

FUZZ(decode)
