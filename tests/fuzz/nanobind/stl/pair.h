#pragma once

#include <utility>
